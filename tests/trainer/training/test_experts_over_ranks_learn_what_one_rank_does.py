"""Experts over ranks: losses, gradients and weights after three steps are those of one rank, for every layout.

With epsilon 1 and learning rate 1 a step of AdamW is nearly the gradient itself.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_api.spec.job_spec import Optimizer
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.stored_tensors import HeldTensor, read_into
from rlhf_trainer.training.loading import load_language_model
from rlhf_trainer.training.model_input import TokenBatch
from rlhf_trainer.training.sharding import ShardedModel, held_piece, named_parameters, shard
from rlhf_trainer.training.trainer import Trainer
from rlhf_trainer.types import Fields
from tests.trainer.families import FAMILIES
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import save_tiny

ROWS, STEPS = 8, 3
MIXTURES = ("Qwen3-MoE", "Qwen2-MoE")
LENGTHS = torch.tensor([5, 17, 9, 12, 2, 14, 7, 11])
Learnt = tuple[list[float], dict[str, Tensor]]
"""(gradient norms, weights after the steps; empty but on rank 0)."""


def texts_of(micro: Fields) -> list[TokenBatch]:
    return [TokenBatch(tokens=micro["tokens"], lengths=micro["mask"].sum(1).long(), read=micro["mask"])]


def trainer_of(folder: str, layout: ParallelSizes, **options: Any) -> Trainer:
    sharding = {name: options.pop(name) for name in ("recompute_activations", "steps_in_host") if name in options}
    model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    settings: Any = {"token_budget": 40, "offload": "None"} | options
    return Trainer(
        shard(model, layout, compute_dtype=torch.float32, **{"recompute_activations": False} | sharding),
        optimizer=Optimizer(learning_rate=1.0, epsilon=1.0, max_grad_norm=1.0),
        total_steps=10,
        max_skipped_updates=0,
        path="models.actor",
        role="actor",
        attention="Auto",
        **settings,
    )


def update(trainer: Trainer, step: int) -> float:
    """A step of SFT on ragged rows, of which each data rank has its share; returns the gradient norm."""
    tokens = torch.randint(3, 500, (ROWS, 17), generator=torch.Generator().manual_seed(step))
    mask = (torch.arange(17) < LENGTHS[:, None]).float()
    data = trainer.mesh.layout.data
    mine = slice(ROWS // data * trainer.mesh.coordinate("data"), ROWS // data * (trainer.mesh.coordinate("data") + 1))

    def loss(found: Any, micro: Fields) -> Tensor:
        return -(found.log_probs * micro["mask"]).sum() / float(LENGTHS.sum())

    return trainer.update({"tokens": tokens[mine], "mask": mask[mine]}, texts_of, loss, step=step)


def whole_weights(model: ShardedModel) -> dict[str, Tensor]:
    """The weights by the pieces of all ranks, on rank 0. A collective."""
    every: list[Any] = [None] * dist.get_world_size()
    pieces = {name: (tuple(each.shape), *held_piece(each.detach())) for name, each in named_parameters(model)}
    dist.all_gather_object(every, pieces)
    whole: dict[str, Tensor] = {}
    for held in every if dist.get_rank() == 0 else ():
        for name, (shape, values, place) in held.items():
            whole.setdefault(name, torch.full(shape, torch.nan))[place.within(place.whole(shape))] = values
    return whole


def learnt(folder: str, layout: ParallelSizes, options: dict[str, Any]) -> Learnt:
    trainer = trainer_of(folder, layout, **options)
    norms = [update(trainer, step) for step in range(1, STEPS + 1)]
    return norms, whole_weights(trainer.model)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A mixture by name, whose routers choose clearly, so that rounding changes no choice."""
    path = tmp_path_factory.mktemp("models")
    return {name: save_tiny(path / name, seed=5, config=copy.deepcopy(FAMILIES[name])) for name in MIXTURES}


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[str, Learnt]:
    return {}


LAYOUTS = {
    "two ranks": ParallelSizes(data=2, expert=2),
    "four ranks": ParallelSizes(data=4, expert=2),
    "two replicas": ParallelSizes(data=4, replicas=2, expert=2),
    "tensor": ParallelSizes(data=2, tensor=2, expert=4),
    "tensor alone": ParallelSizes(data=1, tensor=2),
    "pipeline": ParallelSizes(data=2, pipeline=2, expert=2),
    "few experts for the ranks": ParallelSizes(data=4, tensor=2, expert=2),
}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_over_ranks_learn_the_same(
    kind: str, family: str, folders: dict[str, str], expected: dict[str, Learnt]
) -> None:
    if family not in expected:
        (expected[family],) = run_kept_ranks(1, learnt, folders[family], ParallelSizes(data=1), {})
    norms, weights = expected[family]
    found = run_kept_ranks(LAYOUTS[kind].world_size, learnt, folders[family], LAYOUTS[kind], {})
    for own, _ in found:
        assert own == pytest.approx(norms, rel=1e-5)
    assert found[0][1].keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[0][1][name], weight, rtol=1e-5, atol=1e-6, msg=name)
