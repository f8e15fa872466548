"""Deals a batch's rows, in bundles, anew over a model's data-parallel ranks, so that each computes about as much."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from rlhf_trainer.training.mesh import ModelMesh
from rlhf_trainer.training.micro_batches import longest_first
from rlhf_trainer.training.models import MissingLayer
from rlhf_trainer.types import Fields


class RowCosts:
    """What a model's layers compute for a row, but for a constant: its FLOPs / (2 x layers)."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        lists = (each for each in model.base_model.children() if isinstance(each, nn.ModuleList))
        layer = next(each for layers in lists for each in layers if not isinstance(each, MissingLayer))
        self._parameters = sum(round(each.numel() * met(name, config)) for name, each in layer.named_parameters())
        heads = config.num_attention_heads
        self._attention = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        self._layers, self._head = int(config.num_hidden_layers), int(config.hidden_size * config.vocab_size)

    def of(self, lengths: Tensor) -> Tensor:
        """int64 [B], of rows with so many tokens: products with parameters, and causal attention to half the square."""
        costs: Tensor = lengths * (self._parameters + self._attention * lengths)
        return costs

    def flops(self, costs: float, read: float) -> float:
        """Of a forward pass of the whole model: costs of its rows, and tokens whose log-probabilities are wanted."""
        return 2.0 * (self._layers * costs + self._head * read)


def met(name: str, config: Any) -> float:
    """Which share of a layer's parameter a token meets: all, but few of the experts of a mixture."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    return config.num_experts_per_tok / experts if experts and "experts" in name.split(".") else 1.0


class Dealt:
    """The rows of a batch, each at the rank that computes it; the results go back to the ranks that hold the rows."""

    def __init__(self, costs: Tensor, bundles: Tensor, mesh: ModelMesh) -> None:
        """costs: int64 [bundles], of this rank's; bundles: int64 [B], the bundle of each of its rows.

        All data-parallel ranks make it together, and decide the same.
        """
        self._mesh = mesh
        sizes = torch.bincount(bundles, minlength=len(costs))
        every = _of_all(torch.stack([costs, sizes], dim=1), mesh)
        ranks = deal([[cost for cost, _ in owned] for owned in every])
        here = mesh.data_rank
        self._moves = any(rank != owner for owner, owned in enumerate(ranks) for rank in owned)
        rank_of_row = [ranks[here][bundle] for bundle in bundles.tolist()]
        self._order = torch.tensor(sorted(range(len(bundles)), key=rank_of_row.__getitem__), dtype=torch.int64)
        self._sent = [rank_of_row.count(rank) for rank in range(len(ranks))]
        self._received = [
            sum(size for (_, size), rank in zip(owned, dealt, strict=True) if rank == here)
            for owned, dealt in zip(every, ranks, strict=True)
        ]

    def rows(self, fields: Fields) -> Fields:
        """The fields, [B, T] or [B], of the rows that this rank computes; T becomes the widest of all ranks."""
        if not self._moves:
            return fields
        tables = [field if field.dim() > 1 else field[:, None] for field in fields.values()]
        widths = self._mesh.of_all(torch.tensor([table.shape[1] for table in tables])).amax(0).tolist()
        tables = [pad(table, (0, width - table.shape[1])) for table, width in zip(tables, widths, strict=True)]
        packed = torch.cat([table[self._order].view(torch.uint8) for table in tables], dim=1)
        sizes = [width * table.element_size() for table, width in zip(tables, widths, strict=True)]
        parts = torch.split(self._mesh.exchange_rows(packed, self._sent, self._received), sizes, dim=1)
        dense = torch.contiguous_format  # as a view of another type must be
        arrived = [part.clone(memory_format=dense).view(table.dtype) for part, table in zip(parts, tables, strict=True)]
        return {
            name: table if field.dim() > 1 else table[:, 0]
            for (name, field), table in zip(fields.items(), arrived, strict=True)
        }

    def back(self, results: Tensor) -> Tensor:
        """The results [B, T] of the rows that this rank holds, from those of the rows that it computed."""
        if not self._moves:
            return results
        restored = results.new_empty((len(self._order), results.shape[1]))
        restored[self._order] = self._mesh.exchange_rows(results, self._received, self._sent)
        return restored


def deal(costs: Sequence[Sequence[int]]) -> list[list[int]]:
    """The rank that computes each bundle, for the bundles of each rank; costs: of these bundles.

    All bundles stay where they are if that is as good as dealing the longest first.
    """
    every = list(chain.from_iterable(costs))
    ranks, work = longest_first(every, len(costs)), [0] * len(costs)
    for cost, rank in zip(every, ranks, strict=True):
        work[rank] += cost
    if max(work) >= max(map(sum, costs)):
        return [[owner] * len(owned) for owner, owned in enumerate(costs)]
    remaining = iter(ranks)
    return [list(islice(remaining, len(owned))) for owned in costs]


def _of_all(values: Tensor, mesh: ModelMesh) -> list[list[list[int]]]:
    """The values [bundles, n] of each data-parallel rank."""
    if mesh.layout.data == 1:
        return [values.tolist()]
    counts = mesh.of_all(torch.tensor([len(values)]))[:, 0].tolist()
    every = mesh.of_all(pad(values, (0, 0, 0, max(counts) - len(values))).flatten())
    return [own.view(-1, values.shape[1])[:count].tolist() for own, count in zip(every, counts, strict=True)]
