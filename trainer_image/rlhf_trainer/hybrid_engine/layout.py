"""Slices of all parameters that a rank holds, in training and in generation.

A model is a list of `Parameter`s under the names and shapes of Hugging Face; the code is the same for all models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.protocols import blocks
from rlhf_trainer.tensor_slice import TensorSlice
from rlhf_trainer.training.experts import shard_dim
from rlhf_trainer.training.sharding import plan_of

LayerPosition = int | Literal["first", "last"]
"""Index of a decoder layer; "first" is the embedding, "last" the final norm and the head."""
Shards = dict[str, TensorSlice]
"""Shards of one rank: name of a parameter -> its slice. Parameters without elements on the rank are left out."""

VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this number before splitting it."""
TENSOR_DIMS: dict[str, int | None] = {"colwise": 0, "rowwise": 1, "replicated_with_grad_allreduce": None}
"""Style in transformers' `base_model_tp_plan` -> dim of a weight [out, in] to split."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of the Hugging Face model, and how it may be split."""

    name: str
    shape: tuple[int, ...]
    """Shape of the weight. Experts' fused gate and up projections [experts, 2 * width, hidden] have the shape of their
    view [experts, 2, width, hidden]."""
    positions: tuple[LayerPosition, ...]
    """Positions of the layers that use the parameter; a tied embedding is used "first" and "last"."""
    tensor_dim: int | None = None
    """Dim that tensor parallelism splits; None: every rank has the whole parameter."""
    heads: int | None = None
    """Number of key or value heads along `tensor_dim`. Generation splits no head; surplus ranks hold copies."""
    unknown_style: str = ""
    """The parameter's style in transformers' plan if `TENSOR_DIMS` lacks it, so that it cannot be split; else empty."""
    multiple: int = 1
    """Generation splits `tensor_dim` as if padded to a multiple of this number."""
    is_experts: bool = False
    """Whether the parameter is a stack of experts; expert parallelism gives each rank some of the experts."""
    is_sparse: bool = False
    """Whether the parameter is in a block with experts. In training, tensor parallelism splits the block's tokens, not
    its weights."""


def describe(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> list[Parameter]:
    """List the parameters of a causal language model in layer order, without making its weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layer_classes = set(model._no_split_modules or [])  # noqa: SLF001 there is no public name
    layers = [f"{name}." for name, module in model.named_modules() if type(module).__name__ in layer_classes]
    styles = {f"{model.base_model_prefix}.{path}": style for path, style in plan_of(config).items()}
    stacks = {name: module for name, module in model.named_modules() if hasattr(module, "is_concatenated")}
    blocks_with_experts = tuple(f"{name.rpartition('.')[0]}." for name in stacks)
    described = []
    for name, weight in model.named_parameters():
        position: LayerPosition = next(
            (number for number, prefix in enumerate(layers) if name.startswith(prefix)), "last"
        )
        parameter = Parameter(name=name, shape=tuple(weight.shape), positions=(position,))
        if weight is embedding.weight:
            tied = head is not None and head.weight is weight
            parameter = _vocabulary(replace(parameter, positions=("first", "last") if tied else ("first",)))
        elif head is not None and weight is head.weight:
            parameter = _vocabulary(parameter)
        elif module := stacks.get(name.rpartition(".")[0]):
            parameter = _experts(parameter, module)
        elif name.startswith(blocks_with_experts):
            parameter = _shared(parameter)
        else:
            parameter = _split(parameter, styles, config)
        described.append(parameter)
    return described


def _vocabulary(parameter: Parameter) -> Parameter:
    return replace(parameter, tensor_dim=0, multiple=VOCABULARY_MULTIPLE)


def _experts(parameter: Parameter, module: Any) -> Parameter:
    """Return the parameter of a stack of experts with its splits: by experts in training, by width in generation."""
    own = replace(parameter, is_experts=True, is_sparse=True)
    if module.is_transposed or not module.is_concatenated or module.has_bias:
        return replace(own, unknown_style="experts of an unknown layout")
    if not parameter.name.endswith("gate_up_proj"):  # down: [experts, hidden, width]
        return replace(own, tensor_dim=2)
    experts, height, hidden = parameter.shape
    return replace(own, shape=(experts, 2, height // 2, hidden), tensor_dim=2)


def _shared(parameter: Parameter) -> Parameter:
    """Return the parameter with vLLM's split of a shared expert; a router and a shared expert's gate are not split."""
    dims = {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}
    dim = next((dim for end, dim in dims.items() if parameter.name.endswith(f".{end}")), None)
    return replace(parameter, is_sparse=True, tensor_dim=dim)


def _split(parameter: Parameter, styles: dict[str, str], config: Any) -> Parameter:
    """Return the parameter with the tensor-parallel split that the model's plan has for the parameter's module."""
    module, _, kind = parameter.name.rpartition(".")
    style = next((style for path, style in styles.items() if fnmatch(module, path)), None)
    if style is None:
        return parameter
    if style not in TENSOR_DIMS:
        return replace(parameter, unknown_style=style)
    dim = TENSOR_DIMS[style]
    if dim == 1 and kind == "bias":  # a bias is added after the sum over ranks
        dim = None
    is_key_or_value = module.endswith((".k_proj", ".v_proj"))
    return replace(parameter, tensor_dim=dim, heads=config.num_key_value_heads if is_key_or_value else None)


def training_shards(model: Sequence[Parameter], sizes: ParallelSizes, rank: int) -> Shards:
    """Return a rank's shards in training: FSDP shards inside tensor-parallel shards inside pipeline stages."""
    at, stages = sizes.coordinates(rank), stages_of(model, sizes.pipeline)
    return {
        parameter.name: training_slice(parameter, sizes, rank)
        for parameter in model
        if at["pipeline"] in stages[parameter.name]
    }


def generation_shards(model: Sequence[Parameter], sizes: ParallelSizes, rank: int) -> Shards:
    """Return a rank's shards in generation: vLLM's tensor-parallel shards in p_g stages of p / p_g training stages.

    ConfigError if t_g ranks cannot share a parameter equally.
    """
    at, stages = sizes.coordinates(rank), generation_stages_of(model, sizes)
    return {
        parameter.name: generation_slice(parameter, sizes, at["generation_tensor"])
        for parameter in model
        if at["generation_pipeline"] in stages[parameter.name]
    }


def training_slice(parameter: Parameter, sizes: ParallelSizes, rank: int) -> TensorSlice:
    """Return a rank's FSDP shard of its tensor-parallel shard, or of its experts, of a parameter of its stage.

    Shards are split like torch.chunk.
    """
    part = TensorSlice.whole(parameter.shape)
    if sizes.tensor > 1:
        _require_known(parameter, "spec.models.actor.parallelism.tensor")
    if parameter.is_experts and sizes.cuts_experts:
        index, shard = sizes.experts_of(rank)
        part, count = part.chunk(0, index, sizes.expert), sizes.expert_shards
        return part.chunk(shard_dim(part.shape, count), shard, count)
    if parameter.tensor_dim is not None and not parameter.is_sparse:
        part = part.chunk(parameter.tensor_dim, rank % sizes.tensor, sizes.tensor)
    return part.chunk(0, sizes.shard_of(rank), sizes.shards)


def generation_slice(parameter: Parameter, sizes: ParallelSizes, shard: int) -> TensorSlice:
    """Return shard `shard` of a parameter's t_g shards in vLLM. ConfigError if t_g ranks cannot share it equally."""
    whole, tensor = TensorSlice.whole(parameter.shape), sizes.generation_tensor
    if tensor > 1:
        _require_known(parameter, "spec.rollout.tensorParallel")
    if parameter.tensor_dim is None or tensor == 1:
        return whole
    parts = min(tensor, parameter.heads or tensor)
    rows = -(-parameter.shape[parameter.tensor_dim] // parameter.multiple) * parameter.multiple
    if rows % parts or tensor % parts:
        raise ConfigError(f"spec.rollout.tensorParallel: {tensor} ranks cannot share {parameter.name} equally")
    size = rows // parts
    part = shard // (tensor // parts)
    return whole.cut(parameter.tensor_dim, min(part * size, whole.stops[parameter.tensor_dim]), (part + 1) * size)


def _require_known(parameter: Parameter, path: str) -> None:
    if parameter.unknown_style:
        what = f"transformers splits {parameter.name} as {parameter.unknown_style}, which is not supported"
        raise ConfigError(f"{path}: expected 1, for {what}")


def stages_of(model: Sequence[Parameter], pipeline: int) -> dict[str, frozenset[int]]:
    """Return the pipeline stages that hold each parameter, by name. ConfigError for more stages than layers."""
    layers = 1 + max((at for parameter in model for at in parameter.positions if isinstance(at, int)), default=-1)
    if pipeline > layers > 0:
        path = "spec.models.actor.parallelism.pipeline"
        raise ConfigError(f"{path}: {pipeline} stages are more than the {layers} layers")
    stage_at: dict[LayerPosition, int] = {"first": 0, "last": pipeline - 1}
    stage_at.update((layer, stage) for stage, rows in enumerate(blocks(layers, pipeline)) for layer in rows)
    return {parameter.name: frozenset(map(stage_at.__getitem__, parameter.positions)) for parameter in model}


def generation_stages_of(model: Sequence[Parameter], sizes: ParallelSizes) -> dict[str, frozenset[int]]:
    """Return the pipeline stages of a generation engine that hold each parameter, by name."""
    width = sizes.pipeline // sizes.generation_pipeline
    training = stages_of(model, sizes.pipeline)
    return {name: frozenset(stage // width for stage in stages) for name, stages in training.items()}
