"""Experts over ranks: losses, gradients and weights after three steps are those of one rank, for every layout.

With epsilon 1 and learning rate 1 a step of AdamW is nearly the gradient itself.
"""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_api.spec.job_spec import Model, Optimizer
from rlhf_api.spec.lora import Lora
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.hybrid_engine.layout import describe, training_shards
from rlhf_trainer.stored_tensors import FLOAT32
from rlhf_trainer.tensor_slice import TensorSlice
from rlhf_trainer.training import optimizer
from rlhf_trainer.training.adapters import add_adapter
from rlhf_trainer.training.loading import load_language_model
from rlhf_trainer.training.model_input import TokenBatch
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.sharding import held_piece, named_parameters, shard
from rlhf_trainer.training.trainer import Trainer
from rlhf_trainer.types import Fields
from tests.trainer.families import FAMILIES
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import save_tiny
from tests.trainer.weights import weights_by_pieces

ROWS, STEPS = 8, 3
MIXTURES = ("Qwen3-MoE", "Qwen2-MoE")
BIASED = "DeepSeek-V3"
"""A family whose routers have a bias, here one by which no token reaches the experts of the second rank."""
LENGTHS = torch.tensor([5, 17, 9, 12, 2, 14, 7, 11])
Learnt = tuple[Sequence[float], dict[str, Tensor]]
"""(gradient norms, weights after the steps; empty but on rank 0)."""


def texts_of(micro: Fields) -> list[TokenBatch]:
    return [TokenBatch(tokens=micro["tokens"], lengths=micro["mask"].sum(1).long(), read=micro["mask"])]


def trainer_of(folder: str, layout: ParallelSizes, *, in_host: bool = False, **options: Any) -> Trainer:
    model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    if lora := options.pop("lora", None):
        source = Model(uri=f"file://{folder}")
        add_adapter(model, Lora(**lora), source, folder, seed=1, path="models.actor.lora")
    recomputes = options.pop("recomputes", False)
    sharded = shard(model, layout, compute_dtype=torch.float32, recompute_activations=recomputes, steps_in_host=in_host)
    settings: Any = {"token_budget": 40, "offload": "OptimizerInHost" if in_host else "None"} | options
    return Trainer(
        sharded,
        optimizer=Optimizer(learning_rate=1.0, epsilon=1.0, max_grad_norm=1.0),
        total_steps=10,
        max_skipped_updates=0,
        path="models.actor",
        role="actor",
        attention="Auto",
        **settings,
    )


def rows(step: int) -> tuple[Tensor, Tensor]:
    """(tokens [B, T], mask [B, T]) of all ranks."""
    tokens = torch.randint(3, 500, (ROWS, 17), generator=torch.Generator().manual_seed(step))
    return tokens, (torch.arange(17) < LENGTHS[:, None]).float()


def update(trainer: Trainer, step: int) -> float:
    """A step of SFT on ragged rows, of which each data rank has its share; returns the gradient norm."""
    tokens, mask = rows(step)
    data = trainer.mesh.layout.data
    mine = slice(ROWS // data * trainer.mesh.coordinate("data"), ROWS // data * (trainer.mesh.coordinate("data") + 1))

    def loss(found: Any, micro: Fields) -> Tensor:
        share: Tensor = -(found.log_probs * micro["mask"]).sum() / float(LENGTHS.sum())
        return share

    return trainer.update({"tokens": tokens[mine], "mask": mask[mine]}, texts_of, loss, step=step)


def fused(place: TensorSlice) -> TensorSlice:
    """A slice of gates [experts, 2, width, hidden] as one of the model's [experts, 2 * width, hidden]."""
    if len(place.starts) < 4:
        return place
    (first, _, _, start), (last, two, width, stop) = place.starts, place.stops
    return TensorSlice((first, 0, start), (last, two * width, stop))


def learnt(folder: str, layout: ParallelSizes, options: dict[str, Any], memory_share: float = 1.0) -> Learnt:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "MEMORY_SHARE", memory_share)
        trainer = trainer_of(folder, layout, **options)
    norms = [update(trainer, step) for step in range(1, STEPS + 1)]
    with trainer.offloader.in_use():
        held = {name: held_piece(each.detach())[1] for name, each in named_parameters(trainer.model)}
        if "lora" not in options:
            described = training_shards(describe(inner(trainer.model.module).config), layout, dist.get_rank())
            assert {name: place for name, place in held.items() if place.numel} == {
                name: fused(place) for name, place in described.items() if place.numel
            }
        assert all(place.numel for name, place in held.items() if ".experts." in name), "no rank is without experts"
        return norms, weights_by_pieces(trainer.model)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folder of each mixture."""
    path = tmp_path_factory.mktemp("models")
    found = {name: save_tiny(path / name, seed=5, config=copy.deepcopy(FAMILIES[name])) for name in (*MIXTURES, BIASED)}
    weights, file = load_file(path / BIASED / "model.safetensors"), path / BIASED / "model.safetensors"
    biases = {name: torch.tensor([9.0, 9.0, 0.0, 0.0]) for name in weights if name.endswith(FLOAT32)}
    save_file(weights | biases, file, {"format": "pt"})
    return found


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> Callable[[str, str], Learnt]:
    """Return a function for what one rank learns from a mixture, in one of the ways."""

    @cache
    def learn(family: str, way: str) -> Learnt:
        found: Learnt = run_kept_ranks(1, learnt, folders[family], ParallelSizes(data=1), WAYS[way])[0]
        return found

    return learn


def require_equal(found: Sequence[Learnt], norms: Sequence[float], weights: dict[str, Tensor]) -> None:
    for own, _ in found:
        assert own == pytest.approx(norms, rel=1e-5)
    assert found[0][1].keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[0][1][name], weight, rtol=1e-5, atol=1e-6, msg=name)


LAYOUTS = {
    "two ranks": ParallelSizes(data=2, expert=2),
    "shards of experts": ParallelSizes(data=4, expert=2),
    "two replicas": ParallelSizes(data=4, replicas=2, expert=2),
    "tensor": ParallelSizes(data=2, tensor=2, expert=4),
    "tensor alone": ParallelSizes(data=1, tensor=2),
    "pipeline": ParallelSizes(data=2, pipeline=2, expert=2),
    "shards of tensor-parallel ranks": ParallelSizes(data=2, tensor=2, expert=2),
    "fewer experts than shards": ParallelSizes(data=4, tensor=2, expert=1),
    "all at once": ParallelSizes(data=2, pipeline=2, tensor=2, expert=2),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"recomputes": True},
    "in host": {"in_host": True, "recomputes": True},
    "offloaded": {"offload": "All"},
    "adapter": {"lora": {"rank": 4, "alpha": 12}},
}
FAST = ((BIASED, "two ranks", "recomputed"),)
"""`test_layouts_learn_what_one_rank_does` has Qwen3-MoE in every layout of eight ranks."""
SLOW = {
    *(("Qwen2-MoE", layout, "plain") for layout in LAYOUTS),
    *(("Qwen2-MoE", "shards of tensor-parallel ranks", way) for way in WAYS),
    *(("Qwen3-MoE", "pipeline", way) for way in WAYS),
}.difference(FAST)


@pytest.mark.parametrize(
    ("family", "layout", "way"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in sorted(SLOW))]
)
def test_experts_over_ranks_learn_the_same(
    family: str, layout: str, way: str, folders: dict[str, str], expected: Callable[[str, str], Learnt]
) -> None:
    sizes = LAYOUTS[layout]
    found = run_kept_ranks(sizes.world_size, learnt, folders[family], sizes, WAYS[way])
    require_equal(found, *expected(family, way))


@pytest.mark.slow
def test_gradients_may_be_reduced_after_every_micro_batch(
    folders: dict[str, str], expected: Callable[[str, str], Learnt]
) -> None:
    sizes = ParallelSizes(data=4, replicas=2, expert=2)
    found = run_kept_ranks(4, learnt, folders["Qwen2-MoE"], sizes, {"token_budget": 20}, -1.0)
    require_equal(found, *expected("Qwen2-MoE", "plain"))


def learn_and_save(folder: str, saved: str) -> None:
    trainer = trainer_of(folder, ParallelSizes(data=4, expert=2))
    for step in range(1, STEPS):
        update(trainer, step)
    trainer.state.begin_save(Path(saved), then=lambda: None, copies=True)
    trainer.state.end_save()


def load_and_learn(folder: str, saved: str, layout: ParallelSizes) -> Learnt:
    trainer = trainer_of(folder, layout)
    trainer.state.load(saved)
    return [update(trainer, STEPS)], weights_by_pieces(trainer.model)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_parts_of_experts(
    folders: dict[str, str], expected: Callable[[str, str], Learnt], tmp_path: Path
) -> None:
    run_kept_ranks(4, learn_and_save, folders["Qwen3-MoE"], str(tmp_path))
    norms, weights = expected("Qwen3-MoE", "plain")
    for layout in (ParallelSizes(data=2, expert=2), ParallelSizes(data=2, tensor=2, expert=4)):
        found = run_kept_ranks(layout.world_size, load_and_learn, folders["Qwen3-MoE"], str(tmp_path), layout)
        require_equal(found, norms[-1:], weights)


def exchanged_bytes(folder: str, recomputes: bool) -> tuple[int, int]:
    """(bytes that this rank gave to all-to-all in an update, tokens that it computed)."""
    trainer = trainer_of(folder, ParallelSizes(data=2, expert=2), recomputes=recomputes)
    sent, tokens = 0, 0
    exchange, run = dist.all_to_all_single, trainer._run

    def count(output: Tensor, given: Tensor, *arguments: Any, **options: Any) -> Any:
        nonlocal sent
        sent += given.nbytes
        return exchange(output, given, *arguments, **options)

    def run_counted(micros: Any, *arguments: Any) -> Any:
        nonlocal tokens
        tokens += sum(micro.given.tokens.numel() for micro in micros)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_to_all_single", count)
            return run(micros, *arguments)

    trainer._run = run_counted
    update(trainer, 1)
    return sent, tokens


@pytest.mark.parametrize("recomputes", [False, True])
def test_tokens_travel_to_their_experts_and_back_once_a_pass(recomputes: bool, folders: dict[str, str]) -> None:
    """There and back in the forward pass and in the backward pass, and once more where layers are recomputed."""
    config: Any = FAMILIES["Qwen3-MoE"]
    passes, micro_batches, ranks = 3 if recomputes else 2, 1, 2
    sent, tokens = map(sum, zip(*run_kept_ranks(ranks, exchanged_bytes, folders["Qwen3-MoE"], recomputes), strict=True))
    rows = tokens * config.num_experts_per_tok * config.hidden_size * 4
    counts = ranks * micro_batches * config.num_experts * 8
    assert sent == config.num_hidden_layers * (2 * passes * rows + (passes - 1) * counts)
