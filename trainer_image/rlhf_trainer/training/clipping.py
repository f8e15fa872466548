"""Clips gradients by their norm over all shards and pipeline stages of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlhf_trainer.training.mesh import ModelMesh


def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, mesh: ModelMesh, *, uncounted: nn.Parameter | None
) -> float:
    """Scale the gradients so that their norm is at most `max_norm`; returns the norm before, the same on every rank.

    uncounted: a copy of a tied parameter, which another stage counts already.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    by_mesh: dict[Any, list[nn.Parameter]] = {}  # torch computes a norm only over gradients of one mesh
    for parameter in parameters:
        gradient = parameter.grad
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(parameter)
    norms = [_norm([each for each in group if each is not uncounted]) for group in by_mesh.values()]
    whole = norms[0] if len(norms) == 1 and mesh.layout.pipeline == 1 else _combined(norms, mesh)
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, whole)
    return float(whole)


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    """The norm of the gradients of parameters of one mesh, over all of their shards."""
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _combined(norms: list[Tensor], mesh: ModelMesh) -> Tensor:
    """The norm over all meshes and stages."""
    squares = torch.stack([norm.double() ** 2 for norm in norms]).sum()
    return torch.tensor(math.sqrt(float(mesh.sum_over_stages(squares))), device=squares.device)
