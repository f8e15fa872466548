"""One optimizer step on shards: learning rate, AdamW, gradient clipping, and when gradients are reduced."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from rlhf_api.spec.job_spec import Optimizer
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.own_code import own_code
from rlhf_trainer.training.distributed import (
    EXPERT_SHARD,
    SHARD,
    ModelMesh,
    device_here,
    device_memory,
    local_shard,
    sum_over_ranks,
)
from rlhf_trainer.training.sharding import ShardedModel

COSINE_FLOOR = 0.1
"""Share of the peak learning rate at which a cosine schedule ends."""
ROUNDING = 1e-6
"""Number added to the gradient norm before dividing by it, as in torch's own clipping."""
MEMORY_SHARE = 0.1
"""Share of the device's memory that unsharded gradients may take, beyond the memory of this rank's gradient shards."""


def learning_rate(settings: Optimizer, step: int, *, total_steps: int, path: str) -> float:
    """Return the learning rate of a step (from 1): peak x linear warm-up x factor of the schedule.

    The factor is 1, a cosine down to a tenth, or the result of the user's function(step, total_steps). path: the
    model's field in the manifest. UserCodeError if that function fails or does not return a number of at least 0.
    """
    warm = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    rate = settings.learning_rate * warm
    if settings.schedule == "Constant":
        return rate
    if settings.schedule == "Cosine":
        done = max(0, step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
        return rate * (COSINE_FLOOR + (1.0 - COSINE_FLOOR) * (0.5 * (1.0 + math.cos(math.pi * done))))
    with own_code(settings.schedule, f"{path}.optimizer.schedule") as own_factor:
        found = own_factor(step, total_steps)
    if not (isinstance(found, Real) and math.isfinite(found) and float(found) >= 0):
        problem = f"returned {found!r:.100} for step {step} of {total_steps}, expected a number of at least 0"
        raise UserCodeError(f"{path}.optimizer.schedule: {settings.schedule} {problem}")
    return rate * float(found)


class ShardedAdamW(torch.optim.AdamW):
    """AdamW whose step is one fused kernel over all local shards, however many parameters there are.

    AdamW computes each element by itself, so a shard needs no other shard. The kernel runs on the shards' device.
    """

    def __init__(self, parameters: Any, settings: Optimizer) -> None:
        super().__init__(
            parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill the lists that torch's step passes to its kernel: parameters, gradients, moments and step counts."""
        is_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local_shard, tensors)
        return is_complex


def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, mesh: ModelMesh, *, uncounted: nn.Parameter | None
) -> float:
    """Scale the gradients to a norm of at most `max_norm`; returns the norm before scaling, the same on every rank.

    This rank's shards are read as plain tensors; one all-reduce adds up all ranks. A shard that n ranks hold counts
    1 / n on each. uncounted: a copy of a tied parameter, whose gradient another stage counts.
    """
    shards: dict[int, list[Tensor]] = defaultdict(list)
    scaled: list[Tensor] = []
    for parameter in parameters:
        if (gradient := parameter.grad) is None:
            continue
        scaled.append(local_shard(gradient))
        if parameter is not uncounted:
            shards[_copies(gradient, mesh)].append(scaled[-1])
    squares = [get_total_norm(held).double() ** 2 / copies for copies, held in shards.items()]
    norm = math.sqrt(sum_over_ranks([torch.stack(squares).sum() if squares else 0.0])[0])
    if (factor := max_norm / (norm + ROUNDING)) < 1:
        torch._foreach_mul_(scaled, factor)
    return norm


def _copies(gradient: Tensor, mesh: ModelMesh) -> int:
    """Return the number of ranks of this pipeline stage that hold the same shard of a gradient."""
    ranks = mesh.layout.data * mesh.layout.context * mesh.layout.tensor
    if not isinstance(gradient, DTensor):
        return ranks
    sizes = gradient.device_mesh.shape
    cuts = [size for size, placement in zip(sizes, gradient.placements, strict=True) if not placement.is_replicate()]
    return ranks // math.prod(cuts)


def _fsdp_shards(parameter: Tensor) -> int:
    """Return the number of FSDP shards of a parameter's tensor-parallel shard, or of a rank's experts."""
    assert isinstance(parameter, DTensor), "FSDP2 has sharded it"
    mesh = parameter.device_mesh
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return sizes.get(SHARD) or sizes[EXPERT_SHARD]


class GradientSync:
    """Choice of when an update gathers weights and reduces gradients over the data-parallel ranks.

    Gradients are reduced after the last backward pass only. Until then a rank holds the whole float32 gradients of its
    stage and tensor-parallel part, not only its shards. If the difference exceeds a tenth of the device's memory on any
    rank, every backward pass reduce-scatters. Then replicas (HSDP) add up their shards after the last backward pass.
    """

    def __init__(self, model: ShardedModel) -> None:
        """Choose when this model's gradients are reduced; a collective of the data-parallel ranks."""
        assert isinstance(model.module, FSDPModule)
        self._module = model.module
        trained = [each for each in model.module.parameters() if each.requires_grad]
        held = [local_shard(each) for each in trained]
        whole = sum(_fsdp_shards(parameter) * local_shard(parameter).nbytes for parameter in trained)
        shards = sum(each.nbytes for each in held if each.device == device_here())  # others have gradients on the host
        fits = whole - shards <= MEMORY_SHARE * device_memory()
        self._reduces_once = model.mesh.largest(int(not fits)) == 0

    @contextmanager
    def root_gathered(self) -> Iterator[None]:
        """Keep FSDP2's root module gathered until the backward pass in the block; otherwise a forward pass frees it."""
        self._module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            self._module.set_reshard_after_forward(True, recurse=False)

    def before_backward(self, is_last: bool) -> None:
        """Set the collectives of the next backward pass; is_last: whether it is the last one of the update."""
        if self._reduces_once:
            self._module.set_requires_gradient_sync(is_last)
        else:
            self._module.set_requires_all_reduce(is_last)
