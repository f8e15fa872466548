"""TrainerState: weights, moments and random state, saved by DCP as safetensors and loaded on other numbers of ranks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rlhf_api.spec import Optimizer
from rlhf_trainer.training.engine import Trainer
from rlhf_trainer.training.models import load_language_model
from rlhf_trainer.training.sharding import full_weights, shard
from rlhf_trainer.training.state import whole_weights
from rlhf_trainer.types import Fields
from tests.trainer.ranks import run_ranks
from tests.trainer.tiny import save_tiny

Tensors = dict[str, torch.Tensor]


def trainer_of(folder: str, *, recompute: bool = False) -> Trainer:
    model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    sharded = shard(model, compute_dtype=torch.float32, recompute_activations=recompute)
    return Trainer(
        sharded,
        token_budget=1024,
        optimizer=Optimizer(learning_rate=1e-2),
        total_steps=10,
        max_skipped_updates=0,
        path="models.actor",
        role="actor",
        offload="None",
    )


def train(trainer: Trainer, steps: range) -> Tensors:
    """Train on tokens that depend on the step only; every rank sees the same, so the numbers of ranks do not matter."""
    for step in steps:
        tokens = torch.randint(3, 500, (2, 12), generator=torch.Generator().manual_seed(step))
        lengths = torch.tensor([12, 12])

        def loss(logits: torch.Tensor, micro: Fields) -> torch.Tensor:
            share: torch.Tensor = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), micro["tokens"][:, 1:].flatten()
            )
            return share / torch.distributed.get_world_size()

        trainer.update({"tokens": tokens}, lengths, loss, step=step)
    return {name: weight.clone() for name, weight in full_weights(trainer.model)}


def save_and_go_on(model: str, folder: str) -> tuple[Tensors, Tensors, torch.Tensor]:
    """(weights when saved, weights two steps later, a random number drawn after the save); trains while it writes."""
    trainer = trainer_of(model)
    saved = train(trainer, range(1, 3))
    torch.manual_seed(7 + torch.distributed.get_rank())
    done: list[bool] = []
    trainer.state.begin_save(Path(folder), then=lambda: done.append(True))
    later = train(trainer, range(3, 5))
    trainer.state.end_save()
    assert done == [True]
    return saved, later, torch.rand(1)


def load_and_go_on(model: str, folder: str) -> tuple[Tensors, Tensors, torch.Tensor]:
    trainer = trainer_of(model, recompute=True)
    train(trainer, range(1, 2))  # something to be forgotten
    torch.manual_seed(0)
    trainer.state.load(Path(folder))
    loaded = {name: weight.clone() for name, weight in full_weights(trainer.model)}
    drawn = torch.rand(1)
    return loaded, train(trainer, range(3, 5)), drawn


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, list[tuple[Tensors, Tensors, torch.Tensor]]]:
    """(model, checkpoint, what each of the two ranks that saved it saw)."""
    root = tmp_path_factory.mktemp("state")
    model = save_tiny(root / "model", seed=3)
    return model, str(root / "saved"), run_ranks(2, save_and_go_on, model, str(root / "saved"))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_goes_on_as_if_never_stopped(
    saved: tuple[str, str, list[tuple[Tensors, Tensors, torch.Tensor]]], ranks: int
) -> None:
    model, folder, before = saved
    (weights, later, _), *_ = before
    for rank, (loaded, resumed, drawn) in enumerate(run_ranks(ranks, load_and_go_on, model, folder)):
        for name, weight in weights.items():
            torch.testing.assert_close(loaded[name], weight, rtol=0, atol=0)
        tolerance = 0.0 if ranks == 2 else 1e-6  # sums over other numbers of ranks round differently
        for name, weight in later.items():
            torch.testing.assert_close(resumed[name], weight, rtol=tolerance, atol=tolerance)
        if rank < 2:
            assert drawn == before[rank][2]


def test_the_weights_can_be_read_without_ranks_and_without_pickle(
    saved: tuple[str, str, list[tuple[Tensors, Tensors, torch.Tensor]]],
) -> None:
    _, folder, before = saved
    found = whole_weights(Path(folder))
    assert sorted(found) == sorted(before[0][0])
    for name, weight in before[0][0].items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0)
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert all(load_file(str(path)) for path in files)
    assert {path.suffix for path in files} == {".safetensors"}
