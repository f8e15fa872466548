"""TopK between replicas: few bytes, nothing lost, the same weights everywhere, and a resume that changes no bit."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_api.spec.job_spec import Optimizer
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.compression import LEFT
from rlhf_trainer.training.distributed import local_shard
from rlhf_trainer.training.head import Likelihood
from rlhf_trainer.training.loading import load_language_model
from rlhf_trainer.training.sharding import shard, trained_parameters
from rlhf_trainer.training.trainer import Trainer
from rlhf_trainer.types import Fields
from tests.trainer.families import FAMILIES
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.reading import all_tokens
from tests.trainer.tiny import divisible_config, save_tiny
from tests.trainer.weights import full_weights

TWO = ParallelSizes(data=2, replicas=2)
LAYOUTS = {
    "2 replicas": TWO,
    "2 replicas of 2 shards": ParallelSizes(data=4, replicas=2),
    "2 replicas of 2 stages": ParallelSizes(data=2, replicas=2, pipeline=2),
}


def trainer_of(folder: str, layout: ParallelSizes, *, compresses: bool = True, max_grad_norm: float = 1.0) -> Trainer:
    model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    return Trainer(
        shard(model, layout, compute_dtype=torch.float32, recompute_activations=False, compresses=compresses),
        token_budget=1024,
        optimizer=Optimizer(learning_rate=1e-2, max_grad_norm=max_grad_norm),
        total_steps=10,
        max_skipped_updates=1,
        path="models.actor",
        role="actor",
        offload="None",
        attention="Auto",
    )


def train(trainer: Trainer, *steps: int, factor: float = 1.0) -> dict[str, Tensor]:
    """On other tokens in each step and on each data-parallel rank; returns the weights afterwards."""
    for step in steps:
        random = torch.Generator().manual_seed(10 * step + trainer.mesh.coordinate("data"))
        tokens = torch.randint(3, 500, (2, 12), generator=random)

        def loss(found: Likelihood, micro: Fields) -> Tensor:
            share: Tensor = -(found.log_probs * micro["mask"]).sum() / 22 / trainer.mesh.layout.data * factor
            return share

        trainer.update({"tokens": tokens, "mask": torch.ones(2, 12)}, all_tokens, loss, step=step)
    return full_weights(trainer.model)


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that a rank of two sends in all-reduces, and in gathers of bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, tensors = function._schema.name, [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        if name == "c10d::allreduce_":
            self.total += sum(each.nbytes for each in tensors)
        if name == "c10d::_allgather_base_" and tensors[0].dtype == torch.uint8:
            self.total += tensors[1].nbytes
        return function(*args, **(kwargs or {}))


class Seen(NamedTuple):
    """What a rank has seen of three steps; tensors by parameter."""

    own: list[Tensor]
    """Sums of the steps that the rank's optimizer took."""
    moved: list[Tensor]
    """Changes of the weights."""
    left: list[Tensor]
    weights: dict[str, Tensor]
    share: float


def three_steps(folder: str, layout: ParallelSizes) -> Seen:
    trainer = trainer_of(folder, layout)
    parameters = [local_shard(each) for each in trained_parameters(trainer.model).values()]
    before, step = [each.clone() for each in parameters], trainer._optimizer.step
    own = [torch.zeros_like(each) for each in parameters]

    def watched() -> None:
        held = [each.clone() for each in parameters]
        step()
        for total, each, old in zip(own, parameters, held, strict=True):
            total.add_(each - old)

    trainer._optimizer.step = watched  # type: ignore[assignment]
    recorder.drain()
    weights = train(trainer, 1, 2, 3)
    sent, dense = recorder.drain().means["gradients/sent_share"]
    left = [local_shard(trainer._optimizer.state[each][LEFT]) for each in trained_parameters(trainer.model).values()]
    moved = [each - old for each, old in zip(parameters, before, strict=True)]
    return Seen(own, moved, left, weights, sent / dense)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), seed=3, config=divisible_config())


@pytest.mark.parametrize(
    "kind", ["2 replicas", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(LAYOUTS)[1:])]
)
def test_what_is_not_sent_is_left_and_weights_are_the_same(kind: str, model: str) -> None:
    layout = LAYOUTS[kind]
    seen = run_kept_ranks(layout.world_size, three_steps, model, layout)
    half = len(seen) // 2
    for one, other in zip(seen[:half], seen[half:], strict=True):
        assert one.share <= 0.05
        for name, weight in one.weights.items():
            assert torch.equal(weight, other.weights[name]), name
        for own, others, moved, left, of_other in zip(one.own, other.own, one.moved, one.left, other.left, strict=True):
            assert not torch.equal(own, others), "each replica steps by its own rows"
            assert left.any()
            torch.testing.assert_close(2 * moved + left + of_other, own + others, rtol=1e-4, atol=1e-6)


def first_moments(folder: str, layout: ParallelSizes, compresses: bool) -> list[Tensor]:
    trainer = trainer_of(folder, layout, compresses=compresses, max_grad_norm=1e9)
    train(trainer, 1)
    states = map(trainer._optimizer.state.__getitem__, trained_parameters(trainer.model).values())
    return [local_shard(state["exp_avg"]) for state in states]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("Llama", TWO),
        ("Qwen3-MoE", ParallelSizes(data=2, replicas=2, tensor=2, expert=2)),
        ("Qwen3-MoE", ParallelSizes(data=4, replicas=2, expert=1)),
    ],
    ids=str,
)
def test_gradients_of_replicas_have_the_whole_one_as_mean(family: str, layout: ParallelSizes, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, seed=3, config=copy.deepcopy(FAMILIES[family]))
    on, off = (run_kept_ranks(layout.world_size, first_moments, folder, layout, each) for each in (True, False))
    half = layout.world_size // 2
    for one, other, whole in zip(on[:half], on[half:], off[:half], strict=True):
        for first, second, expected in zip(one, other, whole, strict=True):
            torch.testing.assert_close((first + second) / 2, expected, rtol=1e-4, atol=1e-7)


def sent_in_a_step(folder: str, compresses: bool) -> float:
    trainer = trainer_of(folder, TWO, compresses=compresses)
    train(trainer, 1)
    sent = Sent()
    with sent:
        train(trainer, 2)
    return sent.total


def test_a_step_sends_a_twentieth_of_the_bytes(model: str) -> None:
    compressed, whole = (run_kept_ranks(2, sent_in_a_step, model, each)[0] for each in (True, False))
    assert 0 < compressed <= 0.05 * whole


def alone(folder: str, compresses: bool) -> dict[str, Tensor]:
    return train(trainer_of(folder, ParallelSizes(data=2), compresses=compresses), 1, 2)


def test_one_replica_compresses_nothing(model: str) -> None:
    on, off = (run_kept_ranks(2, alone, model, each)[0] for each in (True, False))
    assert all(torch.equal(weight, off[name]) for name, weight in on.items())


def with_nan(folder: str, steps: tuple[int, ...]) -> dict[str, Tensor]:
    trainer = trainer_of(folder, TWO)
    for step in steps:
        train(trainer, abs(step), factor=1.0 if step > 0 else float("nan"))
    return full_weights(trainer.model)


def test_a_skipped_update_leaves_nothing_behind(model: str) -> None:
    skipped, without = (run_kept_ranks(2, with_nan, model, steps)[0] for steps in ((1, -2, 3), (1, 3)))
    assert all(torch.equal(weight, without[name]) for name, weight in skipped.items())


def save_and_go_on(folder: str, checkpoint: str) -> dict[str, Tensor]:
    trainer = trainer_of(folder, TWO)
    train(trainer, 1, 2)
    trainer.state.begin_save(Path(checkpoint), then=lambda: None, copies=True)
    later = train(trainer, 3, 4)
    trainer.state.end_save()
    return later


def load_and_go_on(folder: str, checkpoint: str, compresses: bool) -> tuple[dict[str, Tensor], list[str]]:
    trainer = trainer_of(folder, TWO, compresses=compresses)
    if compresses:
        train(trainer, 9)  # something to be forgotten
    recorder.drain()
    trainer.state.load(checkpoint)
    warnings = list(recorder.drain().warnings.values())
    return train(trainer, 3, 4), warnings


def test_a_resume_changes_no_bit_or_says_what_it_drops(model: str, tmp_path: Path) -> None:
    later = run_kept_ranks(2, save_and_go_on, model, str(tmp_path))
    for (resumed, warnings), before in zip(
        run_kept_ranks(2, load_and_go_on, model, str(tmp_path), True), later, strict=True
    ):
        assert not warnings
        assert all(torch.equal(weight, before[name]) for name, weight in resumed.items())
    _, (warning,) = run_kept_ranks(2, load_and_go_on, model, str(tmp_path), False)[0]
    assert "are dropped" in warning
