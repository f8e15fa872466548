"""What an update sends and starts: each FSDP unit is reduced once, a small model is one, and AdamW is a few kernels.

With epsilon 1 and learning rate 1 a step of AdamW is nearly the gradient itself.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_api.spec.job_spec import Optimizer
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.training import optimizer, sharding
from rlhf_trainer.training.loading import load_scorer
from rlhf_trainer.training.model_input import TokenBatch
from rlhf_trainer.training.optimizer import clip_gradients
from rlhf_trainer.training.sharding import shard
from rlhf_trainer.training.trainer import Trainer
from rlhf_trainer.types import Fields
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import divisible_config, save_tiny
from tests.trainer.weights import full_weights

LENGTHS = torch.tensor([7, 5, 6, 8])
LAYERS = 4


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that torch dispatches, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def trainer_of(folder: str, layout: ParallelSizes, *, token_budget: int) -> Trainer:
    model = load_scorer(folder, seed=0, trust_remote_code=False, revision=None, path="")
    return Trainer(
        shard(model, layout, compute_dtype=torch.float32, recompute_activations=False),
        token_budget=token_budget,
        optimizer=Optimizer(learning_rate=1.0, epsilon=1.0),
        total_steps=10,
        max_skipped_updates=0,
        path="models.critic",
        role="critic",
        offload="None",
        attention="Auto",
    )


def update(trainer: Trainer, step: int) -> float:
    """On other tokens in each step and on each rank; returns the gradient norm."""
    seed = 10 * step + trainer.mesh.coordinate("data")
    tokens = torch.randint(3, 500, (4, 8), generator=torch.Generator().manual_seed(seed))

    def loss(scores: Tensor, micro: Fields) -> Tensor:
        return (scores * micro["weights"]).square().sum() / 26

    def texts_of(micro: Fields) -> list[TokenBatch]:
        return [TokenBatch(tokens=micro["tokens"], lengths=micro["weights"].sum(1).long())]

    weights = (torch.arange(8) < LENGTHS[:, None]).float()
    return trainer.update({"tokens": tokens, "weights": weights}, texts_of, loss, step=step)


def operations_of_a_step(folder: str) -> Counter[str]:
    """Of clipping and of the optimizer's step, when the moments are there already."""
    trainer = trainer_of(folder, ParallelSizes(data=2), token_budget=100)
    update(trainer, 1)
    for parameter in trainer.model.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    operations = Operations()
    with operations:
        clip_gradients(trainer.model.module.parameters(), 1e-3, trainer.mesh, uncounted=None)
        trainer._step(2)
    del operations.seen["aten::view"]  # it starts nothing
    return operations.seen


def test_a_step_is_as_many_kernels_for_any_number_of_parameters(tmp_path: Path) -> None:
    counts = []
    for layers in (1, 4):
        config = divisible_config()
        config.num_hidden_layers = layers
        folder = save_tiny(tmp_path / str(layers), seed=3, labels=1, config=config)
        counts.append(run_kept_ranks(2, operations_of_a_step, folder)[0])
    assert counts[0] == counts[1]
    assert counts[0]["aten::_fused_adamw_"] == 1


Learnt = tuple[Counter[str], list[float], dict[str, Tensor]]
"""(operations of the second update, gradient norms, weights after the updates)."""


def learnt(folder: str, layout: ParallelSizes, token_budget: int, memory_share: float, one_unit: int = 0) -> Learnt:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "MEMORY_SHARE", memory_share)
        patch.setattr(sharding, "MAX_SINGLE_UNIT_BYTES", one_unit)
        trainer = trainer_of(folder, layout, token_budget=token_budget)
    norms = [update(trainer, 1)]
    operations = Operations()
    with operations:
        norms.append(update(trainer, 2))
    return operations.seen, norms, full_weights(trainer.model)


MUCH, NONE = 1.0, -1.0
UNITS = {  # of FSDP on a rank: its layers, and the root with embedding, norm or head
    "two ranks": (ParallelSizes(data=2), LAYERS + 1),
    "two stages": (ParallelSizes(data=2, pipeline=2), LAYERS // 2 + 1),
    "two shards of two tensor-parallel ranks": (ParallelSizes(data=2, tensor=2), LAYERS + 1),
    "two replicas": (ParallelSizes(data=4, replicas=2), LAYERS + 1),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), seed=3, labels=1, config=divisible_config())


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "two ranks")) for kind in UNITS]
)
def test_gradients_are_reduced_after_the_last_micro_batch(kind: str, model: str) -> None:
    layout, units = UNITS[kind]
    seen, norms, weights = run_kept_ranks(layout.world_size, learnt, model, layout, 1, MUCH)[0]
    assert seen["c10d::_reduce_scatter_base_"] == units
    often, expected_norms, expected = run_kept_ranks(layout.world_size, learnt, model, layout, 1, NONE)[0]
    assert often["c10d::_reduce_scatter_base_"] == len(LENGTHS) * units, "there is no memory for whole gradients"
    assert seen["c10d::allreduce_"] == often["c10d::allreduce_"], "replicas add up the last micro-batch's only"
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "two ranks")) for kind in UNITS]
)
def test_a_small_stage_is_gathered_once_a_micro_batch(kind: str, model: str) -> None:
    layout, units = UNITS[kind]
    seen, norms, weights = run_kept_ranks(layout.world_size, learnt, model, layout, 1, MUCH, 2**20)[0]
    assert seen["c10d::_reduce_scatter_base_"] == 1
    layers, expected_norms, expected = run_kept_ranks(layout.world_size, learnt, model, layout, 1, MUCH)[0]
    saved = layers["c10d::_allgather_base_"] - seen["c10d::_allgather_base_"]
    assert saved == (units - 1) * 2 * len(LENGTHS), "layers are gathered in each forward and backward pass"
    whole, _, _ = run_kept_ranks(layout.world_size, learnt, model, layout, 100, MUCH, 2**20)[0]
    more = seen["c10d::_allgather_base_"] - whole["c10d::_allgather_base_"]
    fewest = layout.pipeline
    assert more == len(LENGTHS) - fewest, "once for the forward and the backward pass of a micro-batch"
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-6, msg=name)


def reductions(folder: str, device: torch.device) -> int:
    """Reduce-scatters of an update with room on `device` for one and a half times a rank's shards of the gradients."""
    model = load_scorer(folder, seed=0, trust_remote_code=False, revision=None, path="")
    shards = sum(4 * parameter.numel() for parameter in model.parameters()) // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "MEMORY_SHARE", 1.5)
        patch.setattr(optimizer, "device_memory", lambda: shards)
        patch.setattr(optimizer, "device_here", lambda: device)
        patch.setattr(sharding, "MAX_SINGLE_UNIT_BYTES", 0)
        trainer = trainer_of(folder, ParallelSizes(data=2), token_budget=1)
    operations = Operations()
    with operations:
        update(trainer, 1)
    return operations.seen["c10d::_reduce_scatter_base_"]


def test_shards_in_host_memory_leave_no_room_for_whole_gradients(model: str) -> None:
    units = LAYERS + 1
    assert run_kept_ranks(2, reductions, model, torch.device("cpu"))[0] == units, "they replace shards on the device"
    assert run_kept_ranks(2, reductions, model, torch.device("meta"))[0] == len(LENGTHS) * units
