"""Shards a transformers model over p-t-d ranks (pipelining, DTensor, FSDP2), and gathers whole weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as wrap_with_checkpoint
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.training.distributed import device_here
from rlhf_trainer.training.mesh import ModelMesh
from rlhf_trainer.training.models import has_copy_of_embedding, inner
from rlhf_trainer.training.offload import bytes_held
from rlhf_trainer.training.pipeline import keep_stage
from rlhf_trainer.training.tensor_parallel import shard_tensors

_CHECKPOINT_PART = "_checkpoint_wrapped_module."


@dataclass(frozen=True)
class ShardedModel:
    """What this rank holds of a model."""

    module: nn.Module
    """A LanguageModel or Scorer whose parameters are DTensors over the data axes and, if t > 1, the tensor axis."""
    mesh: ModelMesh
    compute_dtype: torch.dtype


def shard(
    model: nn.Module,
    layout: ParallelSizes | None = None,
    *,
    compute_dtype: torch.dtype,
    recompute_activations: bool,
    steps_in_host: bool = False,
) -> ShardedModel:
    """Cut a float32 model into pipeline stages, those into tensor-parallel shards, and those into FSDP2 shards.

    All ranks call it together. layout: of all ranks; None: all are data-parallel. An FSDP2 unit is a decoder layer. The
    model computes in `compute_dtype` and reduces gradients in float32. steps_in_host: shards, their gradients and so
    the optimizer's moments are in host memory (pinned for a GPU), from which FSDP2 copies a layer to the device.
    """
    mesh = ModelMesh(layout or ParallelSizes(data=dist.get_world_size()))
    blocks = set(inner(model)._no_split_modules or [])  # noqa: SLF001 there is no public name
    if mesh.layout.pipeline > 1:
        keep_stage(model, mesh)
    if mesh.layout.tensor > 1:
        shard_tensors(inner(model), mesh.tensor_axis)
    layers = [module for module in model.modules() if type(module).__name__ in blocks]
    if not layers:
        raise ConfigError(
            f"{type(inner(model)).__name__} does not say which modules are its layers, so it cannot be sharded"
        )
    model.to(device_here())
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if recompute_activations:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda layer: wrap_with_checkpoint(
                layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT
            ),
            check_fn=lambda module: module in layers,
        )
    offload = CPUOffloadPolicy(pin_memory=device_here().type == "cuda") if steps_in_host else OffloadPolicy()
    for layer in layers:
        fully_shard(layer, mesh=mesh.data_axes, mp_policy=policy, offload_policy=offload)
    # the root is resharded after the forward pass too, so that no gathered copy in compute_dtype stays
    fully_shard(model, mesh=mesh.data_axes, mp_policy=policy, offload_policy=offload, reshard_after_forward=True)
    return ShardedModel(model.eval(), mesh, compute_dtype)  # no dropout: updates compute as scoring did


def named_parameters(model: ShardedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, parameter) of this rank's stage of a sharded model, in layer order.

    The last stage's copy of a tied embedding has the embedding's name.
    """
    wrapper = f"{next(iter(dict(model.module.named_children())))}."
    copied = {"lm_head.weight": f"{inner(model.module).base_model_prefix}.embed_tokens.weight"}
    new_names = copied if has_copy_of_embedding(model.module) else {}
    for name, parameter in model.module.named_parameters():
        assert bytes_held([parameter]) or not parameter.numel(), f"{name} is away; see Offloader.in_use"
        own = name.removeprefix(wrapper).replace(_CHECKPOINT_PART, "")
        yield new_names.get(own, own), parameter


def full_weights(model: ShardedModel) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole float32 tensor) of each parameter of this rank's stage, in layer order.

    A collective for each: all ranks must iterate together.
    """
    for name, parameter in named_parameters(model):
        weight = parameter.detach().to(device_here())  # from host memory, if that is its home
        assert isinstance(weight, DTensor), f"{name} is not in its sharded form"
        yield name, weight.full_tensor()


def weights_on_first_rank(model: ShardedModel) -> dict[str, Tensor]:
    """The whole weights of all stages on rank 0, on the CPU; an empty dict on other ranks. A collective."""
    mesh = model.mesh
    leads = mesh.coordinate("data") == mesh.coordinate("tensor") == 0
    weights: dict[str, Tensor] = {}
    for name, weight in full_weights(model):
        if leads:
            weights[name] = weight.cpu().clone()  # a gathered weight may be a view into a longer, padded storage
    for stage in range(1, mesh.layout.pipeline):
        leader = stage * mesh.layout.tensor
        if dist.get_rank() == leader:
            dist.send_object_list([{name: (weight.shape, weight.dtype) for name, weight in weights.items()}], dst=0)
            for weight in weights.values():
                dist.send(weight.to(device_here()), dst=0)
        elif dist.get_rank() == 0:
            described: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{}]
            dist.recv_object_list(described, src=leader)
            for name, (shape, dtype) in described[0].items():
                received = torch.empty(shape, dtype=dtype, device=device_here())
                dist.recv(received, src=leader)
                weights[name] = received.cpu()
    return weights if dist.get_rank() == 0 else {}
