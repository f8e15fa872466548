"""Clips gradients by their norm over all shards and pipeline stages of a model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from rlhf_trainer.training.distributed import local_shard
from rlhf_trainer.training.mesh import ModelMesh

ROUNDING = 1e-6
"""Added to the norm that the gradients are divided by, as torch's own clipping does."""


def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, mesh: ModelMesh, *, uncounted: nn.Parameter | None
) -> float:
    """Scale the gradients so that their norm is at most `max_norm`; returns the norm before, the same on every rank.

    Reads this rank's shards as plain tensors; one all-reduce adds up all ranks, each copy of a shard by its share.
    uncounted: a copy of a tied parameter, which another stage counts already.
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
    norm = math.sqrt(mesh.sum_over_all(torch.stack(squares).sum() if squares else torch.zeros(())))
    if (factor := max_norm / (norm + ROUNDING)) < 1:
        torch._foreach_mul_(scaled, factor)
    return norm


def _copies(gradient: Tensor, mesh: ModelMesh) -> int:
    """How many ranks of this stage hold the same shard."""
    ranks = mesh.layout.data * mesh.layout.tensor
    if not isinstance(gradient, DTensor):
        return ranks
    sizes = gradient.device_mesh.shape
    cuts = [size for size, placement in zip(sizes, gradient.placements, strict=True) if not placement.is_replicate()]
    return ranks // math.prod(cuts)
