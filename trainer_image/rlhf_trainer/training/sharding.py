"""FSDP2 over a transformers model, and the full weights back out of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as wrap_with_checkpoint
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlhf_trainer.errors import ConfigError
from rlhf_trainer.training.distributed import data_mesh, device_here
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.offload import bytes_held

_CHECKPOINT_PART = "_checkpoint_wrapped_module."


def shard(model: nn.Module, *, compute_dtype: torch.dtype, recompute_activations: bool) -> nn.Module:
    """Shard a float32 model over all ranks, a unit a decoder layer; computes in `compute_dtype`, reduces in float32."""
    blocks = set(inner(model)._no_split_modules or [])  # noqa: SLF001 there is no public name
    layers = [module for module in model.modules() if type(module).__name__ in blocks]
    if not layers:
        raise ConfigError(
            f"{type(inner(model)).__name__} does not say which modules are its layers, so it cannot be sharded"
        )
    model.to(device_here())
    mesh = data_mesh()
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if recompute_activations:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda layer: wrap_with_checkpoint(
                layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT
            ),
            check_fn=lambda module: module in layers,
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # so no rounded copy stays gathered
    return model


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, parameter) of a sharded model, in layer order."""
    wrapper = f"{next(iter(dict(model.named_children())))}."
    for name, parameter in model.named_parameters():
        assert bytes_held([parameter]) or not parameter.numel(), f"{name} is away; see Residence.in_use"
        yield name.removeprefix(wrapper).replace(_CHECKPOINT_PART, ""), parameter


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole float32 tensor) of each parameter, in layer order; all ranks go through it together."""
    for name, parameter in named_parameters(model):
        weight = parameter.detach()
        assert isinstance(weight, DTensor), f"{name} is not in its sharded form"
        yield name, weight.full_tensor()
