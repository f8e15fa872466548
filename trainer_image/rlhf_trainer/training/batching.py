"""Rows of a batch: their bundles, mini-batches and micro-batches, and load balancing over data-parallel ranks."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from rlhf_api.spec.job_spec import Training
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.expert_rows import expert_count
from rlhf_trainer.training.branches import PrefixTree, branches_in_order
from rlhf_trainer.training.distributed import ModelMesh, rows_of_all_ranks
from rlhf_trainer.training.model_input import TokenBatch
from rlhf_trainer.training.models import MissingLayer
from rlhf_trainer.types import Batch, Fields


def micro_batches(lengths: Tensor, *, token_budget: int, at_least: int = 1) -> list[Tensor]:
    """Divide bundles of rows among micro-batches; returns the indices (int64) of the bundles of each micro-batch.

    There are as few micro-batches as the budget allows, but at least `at_least`, some perhaps empty; none without
    bundles. lengths: int64 [bundles], tokens of each. A micro-batch holds token_budget tokens at most, or one bundle.
    """
    if not len(lengths):
        return []
    count = max(at_least, -(-int(lengths.clamp(max=token_budget).sum()) // token_budget))
    while True:
        found = torch.tensor(longest_first(lengths.tolist(), count))
        groups = [(found == group).nonzero()[:, 0] for group in range(count)]
        if all(len(rows) == 1 or int(lengths[rows].sum()) <= token_budget for rows in groups):
            return groups
        count += 1


def longest_first(costs: Sequence[int], count: int) -> list[int]:
    """Divide costs into `count` groups with similar sums; returns the group, 0 .. count - 1, of each cost.

    The largest cost comes first, and each cost joins the group with the smallest sum so far.
    The largest sum is at most 4/3 of the optimum (Graham 1969, "Bounds on multiprocessing timing anomalies").
    """
    least, found = [(0, group) for group in range(count)], [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda each: -costs[each]):
        total, group = least[0]
        heapq.heapreplace(least, (total + costs[place], group))
        found[place] = group
    return found


def mini_batches(
    trained: Tensor, batch: Batch, training: Training, mesh: ModelMesh, *, size: int | None
) -> Iterator[Tensor]:
    """Yield the mini-batches of all epochs of a step, each as a mask of this rank's rows: bool [B].

    trained: bool [B], the rows to learn from; the others are in no mini-batch. size: the most rows of a mini-batch over
    all ranks; None: all rows. No mini-batch is empty on all ranks. The assignment is the same for any number of ranks.
    """
    everywhere = rows_of_all_ranks(trained.float(), batch.start, mesh.data_group)
    positions = (everywhere.cumsum(0).long() - 1).clamp(min=0)[batch.start : batch.start + batch.size]
    total = int(everywhere.sum())
    count = -(-total // (size or max(total, 1)))
    for epoch in range(training.update_epochs):
        assigned = assign_mini_batches(positions, count=max(count, 1), seed=training.seed, step=batch.step, epoch=epoch)
        yield from (trained & (assigned == number) for number in range(count))


def assign_mini_batches(rows: Tensor, *, count: int, seed: int, step: int, epoch: int) -> Tensor:
    """Return the index of each row's mini-batch, 0 .. count - 1: int64 [B].

    rows: int64 [B], positions among the rows to learn from. Of `count` neighbouring rows one goes to each mini-batch,
    by a permutation of (seed, step, epoch), so all ranks get about the same number of rows of each mini-batch.
    """
    blocks = {
        block: np.random.default_rng((seed, step, epoch, block)).permutation(count)
        for block in set((rows // count).tolist())
    }
    return torch.tensor([int(blocks[row // count][row % count]) for row in rows.tolist()], dtype=torch.int64)


@dataclass(frozen=True)
class Bundles:
    """Bundles of rows [B] that share prefixes, numbered from 0; one rank computes a bundle, in one micro-batch."""

    of_rows: Tensor
    """Index of the bundle that contains each row of the batch: int64 [B]."""
    row_of_text: Tensor
    """Index of the row of each text, or of each branch of a row that is a tree: int64 [texts]."""
    lengths: Tensor
    """Number of tokens of each text: int64 [texts]."""
    shared: Tensor
    """Number of tokens of each text that another text of the bundle computes: int64 [texts]."""

    @classmethod
    def of(cls, texts: Sequence[TokenBatch], *, token_budget: int, share: bool = True) -> Bundles:
        """Bundle rows by prefixes of their first text; a bundle has at most token_budget tokens, or one row.

        share: whether texts share prefixes. Bundles are in the order of their first rows.
        """
        of_rows, sizes = torch.arange(len(texts[0].lengths)), list[tuple[int, int, int]]()
        tree, tokens, first = PrefixTree(shares=share), 0, 0
        for row, branches in branches_in_order(texts):
            found, total = [tree.add(each)[0] for each in branches], sum(each.size for each in branches)
            tokens += total - sum(found)
            if not found[0] or tokens > token_budget:
                tree, first = PrefixTree(shares=share), row
                found = [tree.add(each)[0] for each in branches]
                tokens = total - sum(found)
            of_rows[row] = first
            sizes += [(row, each.size, size) for each, size in zip(branches, found, strict=True)]
        numbers: dict[int, int] = {}
        in_order = [numbers.setdefault(first, len(numbers)) for first in of_rows.tolist()]
        return cls(torch.tensor(in_order, dtype=torch.int64), *torch.tensor(sizes, dtype=torch.int64).view(-1, 3).T)

    def sums(self, values: Tensor) -> Tensor:
        """Sum values int64 [texts] over the texts of each bundle: [bundles]."""
        count = int(self.of_rows.max()) + 1 if len(self.of_rows) else 0
        return values.new_zeros(count).index_add(0, self.of_rows[self.row_of_text], values)

    @property
    def tokens(self) -> Tensor:
        """Number of tokens that a pass over each bundle computes, shared ones once: int64 [bundles]."""
        return self.sums(self.lengths - self.shared)

    def rows(self, numbers: Tensor) -> Tensor:
        """Return the indices of the rows in the bundles with the indices `numbers`, in ascending order: int64."""
        return torch.isin(self.of_rows, numbers).nonzero()[:, 0]


class RowCosts:
    """Estimate of the cost of a row in a model's layers: FLOPs of a forward pass / (2 x number of layers)."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        lists = (each for each in model.base_model.children() if isinstance(each, nn.ModuleList))
        layer = next((each for layers in lists for each in layers if not isinstance(each, MissingLayer)), None)
        if layer is None:
            raise ConfigError(f"{model.name_or_path}: {type(model).__name__} has no list of layers in its base model")
        experts = expert_count(config)
        share = config.num_experts_per_tok / experts if experts else 1.0  # share of the experts that compute a token
        self._parameters = sum(
            round(each.numel() * (share if "experts" in name.split(".") else 1.0))
            for name, each in layer.named_parameters()
        )
        heads = config.num_attention_heads
        self._attention = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        self._layers, self._head = int(config.num_hidden_layers), int(config.hidden_size * config.vocab_size)

    def of(self, lengths: Tensor) -> Tensor:
        """Return int64 costs of texts of these lengths (any shape): products with parameters, and causal attention."""
        costs: Tensor = lengths * (self._parameters + self._attention * lengths)
        return costs

    def flops(self, costs: float, read: float) -> float:
        """Return the FLOPs of a forward pass; costs: sum over texts; read: number of tokens with log-probabilities."""
        return 2.0 * (self._layers * costs + self._head * read)


class RowAssignment:
    """Load balancing of a batch: rows go to the ranks that compute them; results go back to the rows' holders."""

    def __init__(self, costs: Tensor, bundles: Tensor, mesh: ModelMesh) -> None:
        """Choose the rank of each bundle of rows; a collective of data-parallel ranks.

        costs: of this rank's bundles, int64 [bundles]; bundles: index of the bundle of each row of this rank, [B].
        """
        self._mesh = mesh
        sizes = torch.bincount(bundles, minlength=len(costs))
        every = _of_all(torch.stack([costs, sizes], dim=1), mesh)
        ranks = assign_bundles([[cost for cost, _ in owned] for owned in every])
        here = dist.get_rank(mesh.data_group)
        self._moves = any(rank != owner for owner, owned in enumerate(ranks) for rank in owned)
        rank_of_row = [ranks[here][bundle] for bundle in bundles.tolist()]
        self._order = torch.tensor(sorted(range(len(bundles)), key=rank_of_row.__getitem__), dtype=torch.int64)
        self._sent = [rank_of_row.count(rank) for rank in range(len(ranks))]
        self._received = [
            sum(size for (_, size), rank in zip(owned, assigned, strict=True) if rank == here)
            for owned, assigned in zip(every, ranks, strict=True)
        ]

    def rows(self, fields: Fields) -> Fields:
        """Send rows to the ranks that compute them; returns the rows that this rank computes: [B, T, ...] or [B]."""
        if not self._moves:
            return fields
        tables = [field.flatten(1) if field.dim() > 1 else field[:, None] for field in fields.values()]
        widths = self._mesh.of_all(torch.tensor([table.shape[1] for table in tables])).amax(0).tolist()
        tables = [pad(table, (0, width - table.shape[1])) for table, width in zip(tables, widths, strict=True)]
        packed = torch.cat([table[self._order].view(torch.uint8) for table in tables], dim=1)
        sizes = [width * table.element_size() for table, width in zip(tables, widths, strict=True)]
        parts = torch.split(self._mesh.exchange_rows(packed, self._sent, self._received), sizes, dim=1)
        dense = torch.contiguous_format  # a view of another type needs it
        arrived = [part.clone(memory_format=dense).view(table.dtype) for part, table in zip(parts, tables, strict=True)]
        return {
            name: torch.unflatten(table, 1, (-1, *field.shape[2:])) if field.dim() > 1 else table[:, 0]
            for (name, field), table in zip(fields.items(), arrived, strict=True)
        }

    def back(self, results: Tensor) -> Tensor:
        """Send results [B, T, ...] back to the ranks that hold the rows; returns the results of this rank's rows."""
        if not self._moves:
            return results
        restored = results.new_empty((len(self._order), *results.shape[1:]))
        restored[self._order] = self._mesh.exchange_rows(results, self._received, self._sent)
        return restored


def assign_bundles(costs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Choose the rank of each bundle; costs: of each rank's bundles. No bundle moves unless the balance gets better."""
    every = list(chain.from_iterable(costs))
    ranks, work = longest_first(every, len(costs)), [0] * len(costs)
    for cost, rank in zip(every, ranks, strict=True):
        work[rank] += cost
    if max(work) >= max(map(sum, costs)):
        return [[owner] * len(owned) for owner, owned in enumerate(costs)]
    remaining = iter(ranks)
    return [list(islice(remaining, len(owned))) for owned in costs]


def _of_all(values: Tensor, mesh: ModelMesh) -> list[list[list[int]]]:
    """Gather the values [bundles, n] of every data-parallel rank; the ranks may have different numbers of bundles."""
    if mesh.layout.data == 1:
        return [values.tolist()]
    counts = mesh.of_all(torch.tensor([len(values)]))[:, 0].tolist()
    every = mesh.of_all(pad(values, (0, 0, 0, max(counts) - len(values))).flatten())
    return [own.view(-1, values.shape[1])[:count].tolist() for own, count in zip(every, counts, strict=True)]
