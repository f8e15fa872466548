"""TrainerState: weights, moments and random state, saved as safetensors and loaded on other numbers of ranks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_api.spec.job_spec import Optimizer
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.training.head import Likelihood
from rlhf_trainer.training.loading import load_language_model
from rlhf_trainer.training.sharding import shard
from rlhf_trainer.training.trainer import Trainer
from rlhf_trainer.types import Fields
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.reading import all_tokens
from tests.trainer.tiny import divisible_config, save_tiny
from tests.trainer.weights import weights_on_first_rank, whole_weights

Tensors = dict[str, torch.Tensor]
KEPT = torch.arange(6.0).view(2, 3)


def trainer_of(folder: str, layout: ParallelSizes, *, recompute: bool = False) -> Trainer:
    model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    sharded = shard(model, layout, compute_dtype=torch.float32, recompute_activations=recompute)
    return Trainer(
        sharded,
        token_budget=1024,
        optimizer=Optimizer(learning_rate=1e-2),
        total_steps=10,
        max_skipped_updates=0,
        path="models.actor",
        role="actor",
        offload="None",
        attention="Auto",
    )


def train(trainer: Trainer, steps: range) -> Tensors:
    """Train on tokens that depend on the step only; every rank sees the same, so the numbers of ranks do not matter."""
    for step in steps:
        tokens = torch.randint(3, 500, (2, 12), generator=torch.Generator().manual_seed(step))

        def loss(found: Likelihood, micro: Fields) -> torch.Tensor:
            share: torch.Tensor = -(found.log_probs * micro["mask"]).sum() / 22
            return share / trainer.mesh.layout.data

        trainer.update({"tokens": tokens, "mask": torch.ones(2, 12)}, all_tokens, loss, step=step)
    return weights_on_first_rank(trainer.model)


def save_and_go_on(model: str, folder: str, layout: ParallelSizes) -> tuple[Tensors, Tensors, torch.Tensor]:
    """(weights when saved, weights two steps later, a random number drawn after the save); trains while it writes."""
    trainer = trainer_of(model, layout)
    saved = train(trainer, range(1, 3))
    torch.manual_seed(7 + torch.distributed.get_rank())
    done: list[bool] = []
    trainer.state.own_tensors["kept"] = KEPT[:, 1:]  # a part
    trainer.state.begin_save(Path(folder), then=lambda: done.append(True), copies=True)
    trainer.state.own_tensors["kept"] = KEPT
    later = train(trainer, range(3, 5))
    trainer.state.end_save()
    assert done == [True]
    return saved, later, torch.rand(1)


def load_and_go_on(model: str, folder: str, layout: ParallelSizes) -> tuple[Tensors, Tensors, torch.Tensor]:
    trainer = trainer_of(model, layout, recompute=True)
    train(trainer, range(1, 2))  # something to be forgotten
    torch.manual_seed(0)
    trainer.state.load(folder)
    assert trainer.state.own_tensors.keys() == {"kept"}
    assert torch.equal(trainer.state.own_tensors["kept"], KEPT[:, 1:])
    loaded = weights_on_first_rank(trainer.model)
    drawn = torch.rand(1)
    return loaded, train(trainer, range(3, 5)), drawn


Saved = tuple[str, str, ParallelSizes, list[tuple[Tensors, Tensors, torch.Tensor]]]
"""(model, checkpoint, the layout that saved it, what each of its ranks saw)."""
TWO, CUT = ParallelSizes(data=2), ParallelSizes(data=1, pipeline=2, tensor=2)


@pytest.fixture(scope="module", params=[pytest.param(TWO, marks=pytest.mark.slow), CUT], ids=["1-1-2", "2-2-1"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    root, layout = tmp_path_factory.mktemp("state"), request.param
    model = save_tiny(root / "model", seed=3, config=divisible_config())
    seen = run_kept_ranks(layout.world_size, save_and_go_on, model, str(root / "saved"), layout)
    return model, str(root / "saved"), layout, seen


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ParallelSizes(data=1), marks=pytest.mark.slow),
        TWO,
        pytest.param(ParallelSizes(data=3), marks=pytest.mark.slow),
        pytest.param(CUT, marks=pytest.mark.slow),
        pytest.param(ParallelSizes(data=2, replicas=2, tensor=2), marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_as_if_never_stopped(saved: Saved, layout: ParallelSizes) -> None:
    model, folder, saved_by, before = saved
    weights, later, _ = before[0]
    after = run_kept_ranks(layout.world_size, load_and_go_on, model, folder, layout)
    loaded, resumed, _ = after[0]
    for name, weight in weights.items():
        torch.testing.assert_close(loaded[name], weight, rtol=0, atol=0)
    tolerance = 0.0 if layout == saved_by else 2e-6  # sums over other numbers of ranks round differently
    for name, weight in later.items():
        torch.testing.assert_close(resumed[name], weight, rtol=tolerance, atol=tolerance)
    for (_, _, drawn), (_, _, then) in zip(after, before, strict=False):
        assert drawn == then


def test_weights_are_read_without_ranks_and_pickle(saved: Saved) -> None:
    _, folder, _, before = saved
    found = whole_weights(folder)
    assert sorted(found) == sorted(before[0][0])
    for name, weight in before[0][0].items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0)
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert all(load_file(str(path)) for path in files)
    assert {path.suffix for path in files} == {".safetensors"}
