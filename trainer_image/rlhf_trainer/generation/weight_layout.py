"""Locations of Hugging Face parameters in vLLM on this rank: fused rows, tensor-parallel shards, padding."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import vllm
from torch import Tensor, nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.generation.quantized_layers import is_quantized
from rlhf_trainer.tensor_slice import TensorSlice

EXPERTS: Mapping[str, str] = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
"""Name of a stack of experts' weights in vLLM -> its name in transformers."""
PLAIN = {UnquantizedMoeBackend.CPU, UnquantizedMoeBackend.TRITON}
"""vLLM's kernels that read stacks of experts as they are; on CPU the stacks are packed after each update."""
TRANSPOSED: Mapping[str, Sequence[str]] = {"GPT2LMHeadModel": ("c_attn", "c_proj", "c_fc")}
"""Class of a model in vLLM -> its modules whose weights are [in, out] at Hugging Face, and [out, in] in vLLM."""
RENAMED: Mapping[str, tuple[str, str]] = {"MixtralForCausalLM": (".block_sparse_moe.", ".mlp.")}
"""Class of a model in vLLM -> (part of its modules' names, that part in transformers)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterLocation:
    """Location of one Hugging Face parameter in the modules of vLLM's model on this rank."""

    module: nn.Module
    attribute: str
    """Name of the module's tensor: `weight`, `bias` or a key of `EXPERTS`."""
    row: int
    """First row of the shard in the module's tensor, which may hold several parameters."""
    shape: tuple[int, ...]
    """Shape of the whole Hugging Face parameter."""
    shard: TensorSlice
    transposed: bool = False

    @property
    def rows(self) -> int:
        """Number of rows that `shard` takes in the module's tensor."""
        return self.shard.shape[1 if self.transposed else 0]

    def view(self, staged: Tensor | None = None) -> Tensor:
        """View the shard in Hugging Face's orientation; staged: plain tensor to view in place of a packed one."""
        tensor: Tensor = getattr(self.module, self.attribute).data if staged is None else staged
        rows = tensor.narrow(0, self.row, self.rows)
        return rows.T if self.transposed else rows.view(self.shard.shape)


@dataclass(frozen=True)
class RowRange:
    """Rows [start, stop) of the `total` rows of a Hugging Face parameter, kept by a module."""

    start: int
    stop: int
    total: int

    @classmethod
    def shard(cls, total: int, index: int, count: int) -> RowRange:
        """Return shard `index` of `count` equal shards of a parameter's `total` rows."""
        return cls(index * (total // count), (index + 1) * (total // count), total)


def locations_of(model: nn.Module) -> dict[str, ParameterLocation]:
    """Return the locations of this rank's parameters, by Hugging Face name, in the order of the model.

    A tied head has no location of its own. EnvironmentProblem for a module of unknown layout.
    """
    seen: set[int] = set()
    locations: dict[str, ParameterLocation] = {}
    prefix = getattr(getattr(model, "model", None), "base_model_prefix", "model")  # vLLM's backend names it `model`
    for vllm_path, module in model.named_modules():
        path = re.sub(r"^model\b", prefix, vllm_path).replace(*RENAMED.get(type(model).__name__, ("", "")))
        own = dict(module.named_parameters(recurse=False))
        attributes = [name for name in own if id(own[name]) not in seen]
        if is_quantized(module):
            attributes = ["weight", *({"bias"} & own.keys())]  # a weight may be packed, and scales come from no file
        elif isinstance(module, AttentionLayerBase):
            attributes = []
        seen |= set(map(id, own.values()))
        stacks = stacks_in(module) if attributes and isinstance(module, RoutedExperts) else {}
        for attribute in stacks:
            locations[f"{path.rpartition('.')[0]}.{EXPERTS[attribute]}"] = _location_of_stack(module, attribute)
        if attributes and not stacks:
            locations.update(_locations_in(model, module, path, attributes))
    return locations


def _locations_in(
    model: nn.Module, module: Any, path: str, attributes: Sequence[str]
) -> Iterator[tuple[str, ParameterLocation]]:
    """Yield (name, location) of the parameters in a module's tensors; a fused tensor holds several."""
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    parent, dot, leaf = path.rpartition(".")
    parts = row_ranges(module)
    names = fused.get(leaf, [leaf])
    if len(parts) > 1 and len(names) == 1 and module.tp_size == 1:  # fused at Hugging Face, too
        parts = [RowRange.shard(sum(part.total for part in parts), 0, 1)]
    if len(parts) != len(names):
        raise EnvironmentProblem(
            f"vLLM {vllm.__version__} keeps {path} in a {type(module).__name__}, and this trainer does not know "
            "how that lays out its weights"
        )
    row = 0
    for name, rows in zip(names, parts, strict=True):
        for attribute in attributes:
            shape, shard = _part_of(module, attribute, rows)
            transposed = leaf in TRANSPOSED.get(type(model).__name__, ()) and attribute == "weight"
            if transposed:
                shape, shard = shape[::-1], TensorSlice(shard.starts[::-1], shard.stops[::-1])
            location = ParameterLocation(
                module=module, attribute=attribute, row=row, shape=shape, shard=shard, transposed=transposed
            )
            yield f"{parent}{dot}{name}.{attribute}", location
        row += rows.stop - rows.start


def _location_of_stack(module: RoutedExperts, attribute: str) -> ParameterLocation:
    """Return the location of a stack of experts, of which a tensor-parallel rank holds a part of the experts' width."""
    config = module.moe_config
    experts, hidden, width = module.local_num_experts, module.hidden_size, config.intermediate_size
    shape = (experts, 2, width, hidden) if attribute == "w13_weight" else (experts, hidden, width)
    part = RowRange.shard(width, config.tp_rank, config.tp_size)
    shard = TensorSlice.whole(shape).cut(2, part.start, part.stop)
    return ParameterLocation(module=module, attribute=attribute, row=0, shape=shape, shard=shard)


def stacks_in(module: RoutedExperts) -> dict[str, tuple[int, ...]]:
    """Return the shapes, before packing, of a module's stacks of experts; {} for an unknown layout."""
    if getattr(module.quant_method, "unquantized_backend", None) not in PLAIN:
        return {}
    config = module.moe_config
    experts, hidden, width = module.local_num_experts, module.hidden_size, config.intermediate_size_per_partition
    return {"w13_weight": (experts, 2 * width, hidden), "w2_weight": (experts, hidden, width)}


def row_ranges(module: Any) -> list[RowRange]:
    """Return the rows that a module keeps of each Hugging Face parameter, in order; [] for an unknown layout."""
    if isinstance(module, QKVParallelLinear):
        head, rank, count, replicas = module.head_size, module.tp_rank, module.tp_size, module.num_kv_head_replicas
        queries = RowRange.shard(module.total_num_heads * head, rank, count)
        keys = RowRange.shard(module.total_num_kv_heads * head, rank // replicas, count // replicas)
        return [queries, keys, keys]
    if isinstance(module, ColumnParallelLinear):
        sizes = getattr(module, "output_sizes", [module.output_size])
        return [RowRange.shard(size, module.tp_rank, module.tp_size) for size in sizes]
    if isinstance(module, VocabParallelEmbedding):
        there = module.shard_indices
        return [RowRange(there.org_vocab_start_index, there.org_vocab_end_index, module.org_vocab_size)]
    if isinstance(module, RowParallelLinear | ReplicatedLinear):
        return [RowRange.shard(module.output_size, 0, 1)]
    own = dict(module.named_parameters(recurse=False))
    is_norm = own.keys() <= {"weight", "bias"} and all(each.ndim == 1 for each in own.values())
    if is_norm or isinstance(module, nn.Embedding):
        return [RowRange.shard(len(module.weight), 0, 1)]
    return []


def _part_of(module: Any, attribute: str, rows: RowRange) -> tuple[tuple[int, ...], TensorSlice]:
    """Return (shape of a Hugging Face parameter, slice of it that this rank holds)."""
    width = getattr(module, "input_size", getattr(module, "embedding_dim", None))
    if attribute == "bias" or width is None:
        return (rows.total,), TensorSlice((rows.start,), (rows.stop,))
    is_cut = isinstance(module, RowParallelLinear)
    columns = RowRange.shard(width, module.tp_rank, module.tp_size) if is_cut else RowRange.shard(width, 0, 1)
    return (rows.total, width), TensorSlice((rows.start, columns.start), (rows.stop, columns.stop))
