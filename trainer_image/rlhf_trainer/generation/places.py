"""Where vLLM keeps each Hugging Face parameter on this rank: fused rows, tensor-parallel shards, padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import vllm
from torch import Tensor, nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rlhf_trainer.boxes import Box
from rlhf_trainer.errors import EnvironmentProblem


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """Where one Hugging Face parameter lies."""

    module: nn.Module
    attribute: str
    """`weight` or `bias` of the module."""
    row: int
    """First row in the module's own tensor."""
    shape: tuple[int, ...]
    """Of the whole Hugging Face parameter."""
    box: Box
    """The part of it that this rank holds."""

    def section(self) -> Tensor:
        """The rows of the module's tensor that hold the box; a weight that is packed has none."""
        tensor: Tensor = getattr(self.module, self.attribute).data
        return tensor.narrow(0, self.row, self.box.shape[0])


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of `total` of a Hugging Face parameter that a module keeps."""

    start: int
    stop: int
    total: int

    @classmethod
    def shard(cls, total: int, index: int, count: int) -> Rows:
        """The shard of that index of `count` equal ones."""
        return cls(index * (total // count), (index + 1) * (total // count), total)


def places_of(model: nn.Module) -> dict[str, Place]:
    """The place of each parameter that this rank holds, by Hugging Face name, in the order of the model.

    A tied head has none of its own. EnvironmentProblem for a module whose layout is not known.
    """
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    seen: set[int] = set()
    places: dict[str, Place] = {}
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        places.update(_places_in(module, path, [name for name in own if id(own[name]) not in seen], fused))
        seen |= set(map(id, own.values()))
    return places


def _places_in(
    module: Any, path: str, attributes: Sequence[str], fused: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Place]]:
    """The places of these tensors of a module; each of the parameters that it fuses has one in each of them."""
    if not attributes:
        return
    parent, dot, leaf = path.rpartition(".")
    parts = rows_of(module)
    names = fused.get(leaf, [leaf])
    if len(parts) != len(names):
        raise EnvironmentProblem(
            f"vLLM {vllm.__version__} keeps {path} in a {type(module).__name__}, and this trainer does not know "
            "how that lays out its weights"
        )
    row = 0
    for name, rows in zip(names, parts, strict=True):
        for attribute in attributes:
            shape, box = _part_of(module, attribute, rows)
            place = Place(module=module, attribute=attribute, row=row, shape=shape, box=box)
            yield f"{parent}{dot}{name}.{attribute}", place
        row += rows.stop - rows.start


def rows_of(module: Any) -> list[Rows]:
    """The rows that a module keeps of each Hugging Face parameter in it, one below the other; [] if not known."""
    if isinstance(module, QKVParallelLinear):
        head, rank, count = module.head_size, module.tp_rank, module.tp_size
        replicas = module.num_kv_head_replicas
        queries = Rows.shard(module.total_num_heads * head, rank, count)
        keys = Rows.shard(module.total_num_kv_heads * head, rank // replicas, count // replicas)
        return [queries, keys, keys]
    if isinstance(module, ColumnParallelLinear):
        sizes = getattr(module, "output_sizes", [module.output_size])
        return [Rows.shard(size, module.tp_rank, module.tp_size) for size in sizes]
    if isinstance(module, VocabParallelEmbedding):
        there = module.shard_indices
        return [Rows(there.org_vocab_start_index, there.org_vocab_end_index, module.org_vocab_size)]
    if isinstance(module, RowParallelLinear):
        return [Rows.shard(module.output_size, 0, 1)]
    if isinstance(module, RMSNorm):
        return [Rows.shard(module.hidden_size, 0, 1)]
    return []


def _part_of(module: Any, attribute: str, rows: Rows) -> tuple[tuple[int, ...], Box]:
    """(shape of a Hugging Face parameter, the part of it that this rank holds)."""
    width = getattr(module, "input_size", getattr(module, "embedding_dim", None))
    if attribute == "bias" or width is None:
        return (rows.total,), Box((rows.start,), (rows.stop,))
    columns = Rows.shard(width, 0, 1)
    if isinstance(module, RowParallelLinear):
        columns = Rows.shard(width, module.tp_rank, module.tp_size)
    return (rows.total, width), Box((rows.start, columns.start), (rows.stop, columns.stop))
