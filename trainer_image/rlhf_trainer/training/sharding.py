"""Sharding of a transformers model over p-t-d ranks (pipelining, DTensor, FSDP2), and filling of each rank's shards."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as wrap_with_checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf_api.problems import choice
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.architecture import CUT, MIXTURES, architecture_of
from rlhf_trainer.errors import ConfigError, DataError, EnvironmentProblem
from rlhf_trainer.expert_rows import expert_count
from rlhf_trainer.stored_tensors import TensorSource, read_into
from rlhf_trainer.tensor_slice import TensorSlice
from rlhf_trainer.training.adapters import AdaptedLinear, shard_adapted
from rlhf_trainer.training.distributed import ModelMesh, device_here
from rlhf_trainer.training.experts import cut_experts, shard_experts
from rlhf_trainer.training.models import (
    Adapter,
    LanguageModel,
    MissingLayer,
    Scorer,
    has_copy_of_embedding,
    inner,
    kept_buffers,
)
from rlhf_trainer.training.offload import bytes_held
from rlhf_trainer.training.passes import keep_stage
from rlhf_trainer.training.sequence import TOKENS, SummedOutput, cut_tokens

CHECKPOINTED = "_checkpoint_wrapped_module."
"""Part that torch's checkpoint wrapper adds to the names of a recomputed layer's tensors."""
MAX_SINGLE_UNIT_BYTES = 32 * 2**20
"""Largest pipeline stage, in bytes of its compute type, that FSDP2 gathers whole; many small collectives cost more."""


@dataclass(frozen=True)
class ShardedModel:
    """This rank's part of a model that is cut over pipeline, tensor and data axes."""

    module: nn.Module
    """A LanguageModel or Scorer whose parameters are DTensors over the data axes and, if t > 1, the tensor axis."""
    mesh: ModelMesh
    compute_dtype: torch.dtype

    @property
    def adapter(self) -> Adapter | None:
        """Adapter of the model; None if the model is trained in full, or not at all."""
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
    compresses: bool = False,
) -> ShardedModel:
    """Cut a float32 model into pipeline stages, each stage into tensor-parallel shards, and these into FSDP2 shards.

    A collective. layout: of all ranks; None: all are data-parallel. An FSDP2 unit is a decoder layer, or a whole stage
    of up to `MAX_SINGLE_UNIT_BYTES`; experts are cut in another way (`cut_experts`). The model computes in
    `compute_dtype`, the type of frozen parameters too, and reduces gradients in float32. A meta model gets memory and
    `model.weights` for this rank's shards only.
    steps_in_host: shards, gradients and moments are in host memory; FSDP2 copies a layer at a time to the device.
    compile_layers: compile the decoder layers by torch.compile. DataError if the values cannot be read,
    EnvironmentProblem without a C++ compiler, ConfigError for compile_layers with tensor or expert parallelism.
    compresses: see `ModelMesh`.
    """
    mesh = ModelMesh(layout or ParallelSizes(data=dist.get_world_size()), compresses=compresses)
    for parameter in (each for each in model.parameters() if not each.requires_grad):
        parameter.data = parameter.data.to(compute_dtype)
    if mesh.layout.pipeline > 1:
        keep_stage(model, mesh)
    cut_experts(model, mesh)
    if mesh.layout.tensor > 1:
        shard_tensors(inner(model), mesh.tensor_axis)
    layers = layers_of(model)
    if recompute_activations:
        wrap = partial(wrap_with_checkpoint, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=layers.__contains__)
    if compile_layers:
        _compile(layers, mesh)
    _shard_data_parallel(model, layers, mesh, compute_dtype, steps_in_host=steps_in_host)
    home = torch.device("cpu") if steps_in_host else device_here()
    model._apply(partial(_at, home))  # type: ignore[no-untyped-call]  # noqa: SLF001 as to() and to_empty() do
    sharded = ShardedModel(model.eval(), mesh, compute_dtype)  # no dropout: updates compute as scoring did
    if model.weights is not None:
        _fill(sharded, model.weights)
        model.weights = None  # the sources hold files open
    return sharded


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a model; ConfigError if the model's class does not name the layers' classes."""
    pretrained = inner(model)
    names = set(pretrained._no_split_modules or [])  # noqa: SLF001 there is no public name
    if layers := [module for module in model.modules() if type(module).__name__ in names]:
        return layers
    raise ConfigError(f"{type(pretrained).__name__} does not say which modules are its layers, so it cannot be sharded")


def _shard_data_parallel(
    model: nn.Module, layers: Sequence[nn.Module], mesh: ModelMesh, compute_dtype: torch.dtype, *, steps_in_host: bool
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device_here().type == "cuda") if steps_in_host else OffloadPolicy()
    size = sum(parameter.numel() for parameter in model.parameters()) * compute_dtype.itemsize
    shard_experts(model, mesh, mp_policy=replace(policy, cast_forward_inputs=False), offload_policy=offload)
    for layer in layers if size > MAX_SINGLE_UNIT_BYTES else ():
        fully_shard(layer, mesh=mesh.data_axes, mp_policy=policy, offload_policy=offload)
    # the root is resharded after a forward pass too (but see `GradientSync.root_gathered`), so that no gathered copy in
    # compute_dtype stays; its inputs keep their types, for a float32 temperature makes log-probabilities float32
    root = replace(policy, cast_forward_inputs=False)
    fully_shard(model, mesh=mesh.data_axes, mp_policy=root, offload_policy=offload, reshard_after_forward=True)


def _compile(layers: Sequence[nn.Module], mesh: ModelMesh) -> None:
    if mesh.layout.tensor > 1:  # AOTAutograd of torch 2.13 recurses without end on DTensors of dynamic shapes
        raise ConfigError(f"spec.training.compile: layers cannot be compiled with tensor {mesh.layout.tensor}, only 1")
    if mesh.layout.expert > 1:  # the host waits for the counts of tokens in the middle of a layer
        raise ConfigError(f"spec.training.compile: layers cannot be compiled with expert {mesh.layout.expert}, only 1")
    from torch._inductor.cpp_builder import get_cpp_compiler  # a slow import
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        problem = "spec.training.compile needs a C++ compiler: install g++ or name one in CXX"
        raise EnvironmentProblem(problem) from error
    for layer in layers:
        layer.compile(dynamic=True)


def _at(home: torch.device, tensor: Tensor) -> Tensor:
    """Move a parameter to `home`, or a buffer to the rank's device; a meta tensor gets memory without values."""
    device = home if isinstance(tensor, nn.Parameter) else device_here()
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def named_parameters(model: ShardedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (Hugging Face name, parameter) of this rank's stage; a copied tied embedding has the embedding's name."""
    wrapper = f"{next(iter(dict(model.module.named_children())))}."
    copied = {"lm_head.weight": f"{inner(model.module).base_model_prefix}.embed_tokens.weight"}
    new_names = copied if has_copy_of_embedding(model.module) else {}
    for name, parameter in model.module.named_parameters():
        assert bytes_held([parameter]) or not parameter.numel(), f"{name} is away; see Offloader.in_use"
        own = name.removeprefix(wrapper).replace(CHECKPOINTED, "")
        yield new_names.get(own, own), parameter


def named_as_stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a transformers model by their Hugging Face names, without `CHECKPOINTED`."""
    return {name.replace(CHECKPOINTED, ""): tensor for name, tensor in tensors.items()}


def trained_parameters(model: ShardedModel) -> dict[str, nn.Parameter]:
    """Return the trained parameters among `named_parameters`: all, or those of an adapter and a new head."""
    return {name: parameter for name, parameter in named_parameters(model) if parameter.requires_grad}


def held_piece(tensor: Tensor) -> tuple[Tensor, TensorSlice]:
    """Return this rank's piece of a tensor, and the place of the piece in the whole tensor.

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


def pieces_to_save(
    mesh: ModelMesh, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor] | None = None
) -> dict[str, tuple[Tensor, TensorSlice]]:
    """Return the pieces of tensors that this rank saves, by name: shards in the first replica, none in the others.

    own: tensors that differ between replicas, so each replica saves its shards.
    """
    saved = {**({} if mesh.replica else tensors), **(own or {})}
    held = {name: held_piece(tensor.detach()) for name, tensor in saved.items()}
    return {name: (tensor, place) for name, (tensor, place) in held.items() if place.numel}


def read_shard(tensor: Tensor, source: TensorSource) -> None:
    """Fill this rank's shard of a tensor; ValueError if the source is of another shape or incomplete."""
    if source.shape != tensor.shape:
        raise ValueError(f"it is {list(source.shape)}, not {list(tensor.shape)}")
    with torch.no_grad():
        read_into(*held_piece(tensor), source)


def _fill(model: ShardedModel, weights: Mapping[str, TensorSource]) -> None:
    kept = named_as_stored(kept_buffers(inner(model.module)))
    for name, tensor in chain(named_parameters(model), kept.items()):
        if name not in weights:
            continue  # the parameter got its values when the model was made
        try:
            read_shard(tensor, weights[name])
            values, _ = held_piece(tensor.detach())
            if values.numel() and torch.stack(values.aminmax()).isfinite().logical_not().any():
                raise ValueError("a value in the file is not finite")
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise DataError(f"{name} cannot be read: {' '.join(str(error).split())}") from error


STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # dim 2: the heads of [B, T, heads, head size]
    "replicated_with_grad_allreduce": partial(SequenceParallel, sequence_dim=2, use_local_output=True),
}
"""Supported tensor-parallel styles of transformers' plans -> the styles of torch that implement them."""


STAGED = (*CUT, *MIXTURES)
"""`model_type` of the families that can be cut into pipeline stages."""
OF_EXPERTS = re.compile(r"\.(experts|shared_experts?)\b")
"""Pattern of names in a plan that are ignored: tensor-parallel ranks divide the tokens of experts instead."""


def plan_of(config: PreTrainedConfig) -> dict[str, str]:
    """Return a config's tensor-parallel plan: module name (`*` for any layer) -> transformers' style; perhaps empty.

    A loaded model's plan would also have styles for embedding and head, which the trainer cuts like vLLM instead.
    """
    return dict(getattr(type(config), "base_model_tp_plan", None) or {})


def shard_tensors(model: PreTrainedModel, axis: DeviceMesh) -> None:
    """Shard a language model or classifier over the ranks of `axis`; embedding and head along the vocabulary.

    Between the layers' blocks each rank has a part of the tokens (`sequence.cut_tokens`).
    """
    base: Any = model.base_model
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    plan = plan_of(model.config)
    planned = {
        name: style
        for name, _ in base.named_modules()
        for key, style in plan.items()
        if fnmatch(name, key) and not OF_EXPERTS.search(name)
    }
    blocks = cut_tokens(base, axis, planned)
    for name, style in planned.items():
        module, is_summed = base.get_submodule(name), style == "rowwise" and name.rpartition(".")[0] in blocks
        made = SummedOutput() if is_summed else STYLES[style]()
        if isinstance(module, AdaptedLinear):
            shard_adapted(module, axis, made)
        else:
            parallelize_module(module, axis, made)
    if base.embed_tokens is not None:
        _cut_embedding(base.embed_tokens, axis)
    head = getattr(model, "lm_head", None)
    if head is not None and not isinstance(head, MissingLayer):
        parallelize_module(head, axis, ColwiseParallel())  # only its weight is used, see `head.likelihood`
        if base.embed_tokens is not None and model.config.tie_word_embeddings:
            head.weight = base.embed_tokens.weight
    for name in frozen:  # torch's SequenceParallel makes weights of norms trainable
        model.get_parameter(name).requires_grad_(requires_grad=False)


def _cut_embedding(module: Any, axis: DeviceMesh) -> None:
    """Make an embedding hold its rank's part of the vocabulary and return its rank's part of the tokens.

    With torch's RowwiseParallel each rank would compute the gradient of the whole vocabulary.
    """
    cut = distribute_tensor(module.weight.data, axis, [Shard(0)])
    module.register_parameter("weight", nn.Parameter(cut, module.weight.requires_grad))
    _, part = held_piece(cut)
    own = range(part.starts[0], part.stops[0])
    module.padding_idx = own.index(module.padding_idx) if module.padding_idx in own else None
    module.forward = partial(_embed, module, module.forward, axis, own)


def _embed(module: Any, embed: Callable[[Tensor], Tensor], axis: DeviceMesh, own: range, ids: Tensor) -> Tensor:
    """Return the embeddings [1, N / t, H] of token ids [1, N]; each rank adds those of its `own` ids."""
    is_other = (ids < own.start) | (ids >= own.stop)
    vars(module)["weight"] = module.weight.to_local()  # a DTensor would have a gradient of the whole vocabulary
    try:
        hidden = embed((ids - own.start).masked_fill(is_other, 0)).masked_fill(is_other[..., None], 0)
    finally:
        del vars(module)["weight"]
    summed = DTensor.from_local(hidden, axis, [Partial()], run_check=False).redistribute(placements=[TOKENS])
    return summed.to_local()


def impossible_sizes(
    config: PreTrainedConfig, *, pipeline: int, tensor: int, expert: int = 1, generates: bool = False
) -> str:
    """Say why a model cannot be cut into these parts, like `pipeline is 3, ...`; empty if it can.

    generates: whether the parts are a generator's.
    """
    model_type = config.model_type
    if pipeline > 1 and model_type not in STAGED:
        return f"pipeline is {pipeline}, but only {choice(STAGED)} can be cut into stages, not {model_type}"
    if expert > 1 and model_type not in MIXTURES:
        only = f"only {choice(MIXTURES)} can be cut by experts, not {model_type}"
        return f"expert is {expert}, but {only if expert_count(config) > 1 else 'the model has no experts'}"
    if tensor > 1:
        styles = plan_of(config)
        if styles and expert_count(config) > 1 and model_type not in MIXTURES:
            return f"tensor is {tensor}, but of mixtures only {choice(MIXTURES)} can be cut, not {model_type}"
        unknown = sorted({style for path, style in styles.items() if not OF_EXPERTS.search(path)} - STYLES.keys())
        if not styles or unknown:
            what = f"cuts layers by {', '.join(unknown)}, which is not supported" if unknown else "does not say how"
            return f"tensor is {tensor}, but the model ({model_type}) cannot be cut: transformers {what}"
    sizes = {"pipeline": pipeline, "tensor": tensor, "expert": expert}
    cut = architecture_of(config.to_dict()).cannot_be_cut(**sizes, generates=generates)
    return " ".join(cut) if cut else ""
