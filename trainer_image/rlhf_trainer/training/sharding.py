"""Shards a transformers model over p-t-d ranks (pipelining, DTensor, FSDP2), and fills each rank's shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as wrap_with_checkpoint
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import ConfigError, DataError, EnvironmentProblem
from rlhf_trainer.stored_tensors import TensorSource, read_into
from rlhf_trainer.tensor_slice import TensorSlice
from rlhf_trainer.training.distributed import device_here
from rlhf_trainer.training.mesh import ModelMesh
from rlhf_trainer.training.models import Adapter, LanguageModel, Scorer, Weights, has_copy_of_embedding, inner
from rlhf_trainer.training.offload import bytes_held
from rlhf_trainer.training.pipeline import keep_stage
from rlhf_trainer.training.tensor_parallel import shard_tensors

_CHECKPOINT_PART = "_checkpoint_wrapped_module."
ONE_UNIT = 32 * 2**20
"""Bytes of a stage, in the type it computes in, up to which it is gathered at once; small collectives cost more."""


@dataclass(frozen=True)
class ShardedModel:
    """What this rank holds of a model."""

    module: nn.Module
    """A LanguageModel or Scorer whose parameters are DTensors over the data axes and, if t > 1, the tensor axis."""
    mesh: ModelMesh
    compute_dtype: torch.dtype

    @property
    def adapter(self) -> Adapter | None:
        """What is trained beside the model's weights; None where they are trained, or nothing is."""
        assert isinstance(self.module, LanguageModel | Scorer)
        return self.module.adapter


def shard(
    model: LanguageModel | Scorer,
    layout: ParallelSizes | None = None,
    *,
    compute_dtype: torch.dtype,
    recompute_activations: bool,
    steps_in_host: bool = False,
    compile_layers: bool = False,
) -> ShardedModel:
    """Cut a float32 model into pipeline stages, those into tensor-parallel shards, and those into FSDP2 shards.

    All ranks call it together. layout: of all ranks; None: all are data-parallel. An FSDP2 unit is a decoder layer, or
    a whole stage of up to `ONE_UNIT` bytes. The model computes in `compute_dtype` and reduces gradients in float32;
    parameters that need no gradient are held in `compute_dtype`. A model on the meta device gets memory for this rank's
    shards only, and then its values from `model.weights`. steps_in_host: shards, their gradients and so the optimizer's
    moments are in host memory (pinned for a GPU), from which FSDP2 copies a layer to the device. compile_layers: by
    torch.compile, which no GPU has confirmed. DataError if the values cannot be read, EnvironmentProblem without a
    compiler, ConfigError for tensor-parallel layers that shall be compiled.
    """
    mesh = ModelMesh(layout or ParallelSizes(data=dist.get_world_size()))
    blocks = set(inner(model)._no_split_modules or [])  # noqa: SLF001 there is no public name
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(compute_dtype)
    if mesh.layout.pipeline > 1:
        keep_stage(model, mesh)
    if mesh.layout.tensor > 1:
        shard_tensors(inner(model), mesh.tensor_axis)
    layers = [module for module in model.modules() if type(module).__name__ in blocks]
    if not layers:
        raise ConfigError(
            f"{type(inner(model)).__name__} does not say which modules are its layers, so it cannot be sharded"
        )
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if recompute_activations:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda layer: wrap_with_checkpoint(
                layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT
            ),
            check_fn=lambda module: module in layers,
        )
    if compile_layers:
        _compile(layers, mesh)
    offload = CPUOffloadPolicy(pin_memory=device_here().type == "cuda") if steps_in_host else OffloadPolicy()
    size = sum(parameter.numel() for parameter in model.parameters()) * compute_dtype.itemsize
    for layer in layers if size > ONE_UNIT else ():
        fully_shard(layer, mesh=mesh.data_axes, mp_policy=policy, offload_policy=offload)
    # the root is resharded after a forward pass too (but see `GradientSync.root_gathered`), so that no gathered copy in
    # compute_dtype stays; its inputs keep their types, for a float32 temperature makes log-probabilities float32
    root = replace(policy, cast_forward_inputs=False)
    fully_shard(model, mesh=mesh.data_axes, mp_policy=root, offload_policy=offload, reshard_after_forward=True)
    home = torch.device("cpu") if steps_in_host else device_here()
    model._apply(partial(_at, home))  # type: ignore[no-untyped-call]  # noqa: SLF001 as to() and to_empty() do
    sharded = ShardedModel(model.eval(), mesh, compute_dtype)  # no dropout: updates compute as scoring did
    if model.weights is not None:
        _fill(sharded, model.weights)
        model.weights = None  # it holds the files open
    return sharded


def _compile(layers: Sequence[nn.Module], mesh: ModelMesh) -> None:
    """Have layers compile themselves in their first passes, once for any number of tokens."""
    if mesh.layout.tensor > 1:  # AOTAutograd of torch 2.13 recurses without end on DTensors of dynamic shapes
        raise ConfigError(f"spec.training.compile: layers cannot be compiled with tensor {mesh.layout.tensor}, only 1")
    from torch._inductor.cpp_builder import get_cpp_compiler  # it takes seconds
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise EnvironmentProblem(
            "spec.training.compile needs a C++ compiler: install g++ or name one in CXX"
        ) from error
    for layer in layers:
        layer.compile(dynamic=True)


def _at(home: torch.device, tensor: Tensor) -> Tensor:
    """A parameter at its home, or a buffer on the device; of one on the meta device only its memory."""
    device = home if isinstance(tensor, nn.Parameter) else device_here()
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


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


def trained_parameters(model: ShardedModel) -> dict[str, nn.Parameter]:
    """Those of `named_parameters` that are trained: all, or those of an adapter and a new head."""
    return {name: parameter for name, parameter in named_parameters(model) if parameter.requires_grad}


def held_piece(tensor: Tensor) -> tuple[Tensor, TensorSlice]:
    """What this rank holds of a tensor, and which of the whole tensor's elements these are.

    The innermost axis of the mesh cuts first: tensor-parallel shards, then those of FSDP2. Torch's own
    `compute_local_shape_and_global_offset` is wrong where tensor-parallel shards are not equally long.
    """
    place = TensorSlice.whole(tuple(tensor.shape))
    if not isinstance(tensor, DTensor):
        return tensor, place
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank of a model is in its mesh"
    for size, index, placement in reversed(list(zip(mesh.shape, coordinate, tensor.placements, strict=True))):
        if isinstance(placement, Shard | _StridedShard):
            place = place.chunk(placement.dim, index, size)
    return tensor.to_local(), place


def pieces_to_save(mesh: ModelMesh, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, TensorSlice]]:
    """What this rank writes of a model's tensors, by name: its shards in the first replica, nothing in the others."""
    if mesh.coordinate("data") >= mesh.layout.shards:
        return {}
    held = {name: held_piece(tensor.detach()) for name, tensor in tensors.items()}
    return {name: (tensor, place) for name, (tensor, place) in held.items() if place.numel}


def read_shard(tensor: Tensor, source: TensorSource) -> None:
    """Fill this rank's shard of a tensor; ValueError if the source is of another shape or incomplete."""
    if source.shape != tensor.shape:
        raise ValueError(f"it is {list(source.shape)}, not {list(tensor.shape)}")
    with torch.no_grad():
        read_into(*held_piece(tensor), source)


def _fill(model: ShardedModel, weights: Weights) -> None:
    """Give this rank's shards their values; DataError if they cannot be read."""
    for name, parameter in named_parameters(model):
        if name not in weights:
            continue  # it has them from the making of the model
        try:
            read_shard(parameter, weights[name])
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise DataError(f"{name} cannot be read: {' '.join(str(error).split())}") from error
