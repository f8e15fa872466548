"""Input of a model for a micro-batch: packed texts, made on the host, so no shape is read from the device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from rlhf_trainer.training.branches import PrefixTree, branches_in_order, indices_of
from rlhf_trainer.training.context import sum_of_parts
from rlhf_trainer.training.head import Compare
from rlhf_trainer.training.routing import packed_experts
from rlhf_trainer.types import Fields, concatenate


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Texts that a model reads, and the tokens whose log-probabilities a loss reads."""

    tokens: Tensor
    """Token ids of the texts: int64 [b, T], padded on the right."""
    lengths: Tensor
    """Number of tokens of each row without padding: int64 [b]."""
    parents: Tensor | None = None
    """Index in its row of the token before each token, int64 [b, T] (`PARENTS`); None: no row is a tree."""
    read: Tensor | None = None
    """Mask [b, T], above 0 at tokens whose log-probability is needed; None for a scorer, which scores every token."""
    temperature: float = 1.0
    """Sampling temperature, by which the logits are divided."""
    experts: Tensor | None = None
    """Experts that the routers must take: uint8 [b, T, E] (`expert_rows`); None: the routers choose."""
    entropy: bool = False
    """Whether the entropies of the tokens in `read` are needed too."""
    likeliest: tuple[int, int] | None = None
    """(K, M) to get, instead of likelihoods, the K likeliest of the first M token ids at each place of `read`."""
    teacher: Tensor | None = None
    """Likeliest tokens of a teacher: float32 [b, T, 2K]; None: no divergence from a teacher is needed."""
    compare: Compare | None = None
    """Divergence from the teacher; see `Compare`."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device: from pinned memory to a GPU, so the host does not wait."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class FieldsOnDevice(Mapping[str, Tensor]):
    """Fields of a micro-batch, each copied to the device when it is first read."""

    def __init__(self, on_host: Fields, device: torch.device) -> None:
        self._on_host, self._copy = on_host, cache(lambda name: to_device(on_host[name], device))

    def __getitem__(self, name: str) -> Tensor:
        return self._copy(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._on_host)

    def __len__(self) -> int:
        return len(self._on_host)


@dataclass(frozen=True)
class Documents:
    """Positions of texts (documents) packed side by side in a row of N tokens.

    A document attends to its own tokens, and to the prefix of its text that other documents compute.
    """

    lengths: tuple[int, ...]
    """Number of tokens of each document, in packed order; the sum is N."""
    starts: Tensor
    """Offset of each document in the packed row, then N: int32 [documents + 1]."""
    seen: tuple[int, ...]
    """Number of tokens that each document's last token attends to: its text, with the prefix in other documents."""
    seen_starts: Tensor
    """Running sums of `seen`, beginning with 0: int32 [documents + 1]."""
    seen_tokens: Tensor | None
    """Packed indices of the tokens that each document attends to: int64 [sum of seen]; None: its own tokens only."""
    own: Self | None = None
    """The parts of the documents that this rank computes, if context-parallel ranks share the row."""
    group: dist.ProcessGroup | None = None
    """Process group of the ranks that share the row; None: this rank computes the whole row."""

    @classmethod
    def of(cls, sizes: Tensor, seen_tokens: Tensor | None) -> Self:
        """Make Documents of sizes int64 [2, documents]: tokens of a document, and tokens that its last token sees."""
        lengths, seen = map(tuple, sizes.tolist())
        starts, seen_starts = pad(sizes.cumsum(1), (1, 0)).int()
        return cls(lengths, starts, seen, seen_starts, seen_tokens)

    def to(self, device: torch.device) -> Self:
        return replace(self, **_on_device(self, device))

    def between(self, first: int, stop: int) -> Self:
        """Return the parts of the documents among the packed tokens first .. stop - 1; they see tokens of all parts."""
        starts, seen_starts = self.starts.tolist(), self.seen_starts.tolist()
        every = torch.arange(starts[-1]) if self.seen_tokens is None else self.seen_tokens
        sizes, tokens = [], []
        for document, (start, own, seen) in enumerate(zip(starts, self.lengths, self.seen, strict=False)):
            low, high = max(start, first), min(start + own, stop)
            if low < high:
                seen -= start + own - high  # noqa: PLW2901 the tokens after the part are not seen
                sizes.append((high - low, seen))
                tokens.append(every[seen_starts[document] : seen_starts[document] + seen])
        return self.of(torch.tensor(sizes).T, torch.cat(tokens))


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """Texts of a micro-batch, packed to one row of N tokens without their padding; a loss reads n of the tokens.

    A row that is a tree is several texts: its branches. A prefix that texts have in common is packed once, with the
    first of them (`PrefixTree`); the others see its keys and values. `unpacked` puts values of tokens back at their
    places in rows of T tokens, one `TokenBatch` below the other; a row's token has the value of its first branch.
    """

    tokens: Tensor
    """Token ids of the packed row: int64 [1, N]."""
    positions: Tensor
    """Position of each packed token in its text: int64 [1, N]."""
    documents: Documents
    shape: tuple[int, int]
    """(rows, T) of the rows before packing, one `TokenBatch` below the other."""
    padding: int
    """Number of filler tokens at the end of the packed row, which belong to no text."""
    whole: Tensor
    """Indices of the m tokens of all rows, without padding, among the rows * T positions: int64 [m], ascending."""
    packed: Tensor
    """Index in the packed row of each token of `whole`: int64 [m]; rows that share a prefix have equal indices."""
    places: Tensor
    """Indices of the n tokens that a loss reads among the rows * T positions: int64 [n]."""
    before: Tensor
    """Index in the packed row of the token before each token that a loss reads: int64 [n]."""
    targets: Tensor
    """Ids of the tokens that a loss reads: int64 [n]."""
    temperature: Tensor
    """Sampling temperature of each token that a loss reads: float32 [n]."""
    experts: Tensor | None
    """Experts that the routers must take for each packed token: uint8 [N, E]; None: the routers choose."""
    entropy: bool
    likeliest: tuple[int, int] | None
    teacher: Tensor | None
    """Likeliest tokens of a teacher at the place of each token that a loss reads: float32 [n, 2K], or None."""
    compare: Compare | None

    @classmethod
    def of(cls, texts: Sequence[TokenBatch], *, share: bool = True, at_least: int = 1, multiple: int = 1) -> Self:
        """Pack texts to a multiple of `multiple`, and at least `at_least`, tokens; unread zeros fill the rest.

        The first token of a text is not read, as nothing predicts it. Texts that share a prefix with an earlier one
        come last. share: whether texts share prefixes; if not, each branch of a tree is computed whole.
        """
        tokens = concatenate([text.tokens for text in texts])
        read = torch.zeros(tokens.shape)  # the temperature of each token that is read
        for text, rows in zip(texts, torch.split(read, [len(text.tokens) for text in texts]), strict=True):
            if text.read is not None:
                rows[:, : text.tokens.shape[1]] = text.temperature * (text.read > 0)
        in_order = [branch for _, branches in branches_in_order(texts) for branch in branches]
        branches = sorted(in_order, key=attrgetter("number"))
        sources = [indices_of(each.runs) + each.row * tokens.shape[1] for each in branches]
        source, lengths = pad_sequence(sources, batch_first=True), torch.tensor([each.size for each in branches])
        column = torch.arange(source.shape[1])
        inside = column < lengths[:, None]
        tree = PrefixTree(shares=share)
        shares = [each for each in ((branch.number, *tree.add(branch)) for branch in in_order) if each[1]]
        shared = torch.zeros_like(lengths)
        for each, size, _ in shares:
            shared[each] = size
        order = (shared > 0).int().argsort(stable=True)
        own = lengths - shared
        starts = torch.empty_like(own)
        starts[order] = own[order].cumsum(0) - own[order]
        packed = (starts - shared)[:, None] + column
        for each, size, earlier in shares:
            packed[each, :size] = packed[earlier, :size]
        computed = (inside & (column >= shared[:, None]))[order]
        total = int(own.sum())
        padding = -(-max(total, at_least) // multiple) * multiple - total
        documents = order[own[order] > 0]
        seen_tokens = torch.cat([packed[documents][inside[documents]], torch.arange(total, total + padding)])
        sizes = torch.stack([own, lengths])[:, documents]
        of_texts = packed[inside]
        whole, first = map(torch.from_numpy, np.unique(source[inside].numpy(), return_index=True))
        temperature = read.flatten()[whole] * (column.expand_as(source)[inside][first] > 0)
        is_read = temperature > 0
        places = whole[is_read]
        teachers = [text.teacher for text in texts if text.teacher is not None]
        return cls(
            tokens=torch.cat([tokens.flatten()[source[order][computed]], tokens.new_zeros(padding)])[None],
            positions=torch.cat([computed.nonzero()[:, 1], torch.arange(padding)])[None],
            documents=Documents.of(pad(sizes, (0, int(padding > 0)), value=padding), seen_tokens if shares else None),
            shape=(tokens.shape[0], tokens.shape[1]),
            padding=padding,
            whole=whole,
            packed=of_texts[first],
            places=places,
            before=of_texts[first[is_read] - 1],
            targets=tokens.flatten()[places],
            temperature=temperature[is_read],
            experts=packed_experts(texts, source[inside], of_texts, shared=int(shared.sum()), total=total + padding),
            entropy=any(text.entropy for text in texts),
            likeliest=texts[0].likeliest,
            teacher=concatenate(teachers).flatten(0, 1)[places] if teachers else None,
            compare=texts[0].compare,
        )

    def to(self, device: torch.device) -> Self:
        """Return a copy of the model input with all tensors on a device."""
        return replace(self, **_on_device(self, device))

    def part(self, index: int, group: dist.ProcessGroup) -> Self:
        """Return the part of the packed row that the rank with this index in a group of ranks computes, and reads."""
        size = self.tokens.shape[1] // group.size()
        first, stop = index * size, (index + 1) * size
        is_own, is_read = ((each >= first) & (each < stop) for each in (self.packed, self.before))
        return replace(
            self,
            tokens=self.tokens[:, first:stop],
            positions=self.positions[:, first:stop],
            padding=min(size, max(0, stop - (self.tokens.shape[1] - self.padding))),
            documents=replace(self.documents, own=self.documents.between(first, stop), group=group),
            whole=self.whole[is_own],
            packed=self.packed[is_own] - first,
            places=self.places[is_read],
            before=self.before[is_read] - first,
            targets=self.targets[is_read],
            temperature=self.temperature[is_read],
            experts=None if self.experts is None else self.experts[first:stop],
            teacher=None if self.teacher is None else self.teacher[is_read],
        )

    def unpacked(self, values: Tensor, places: Tensor) -> Tensor:
        """Return zeros [rows, T, ...] with `values` [n, ...] at the indices `places` among the rows * T positions.

        Ranks that share the packed row exchange their values.
        """
        rows, width = self.shape
        zeros = values.new_zeros(rows * width, *values.shape[1:])
        own = zeros.index_copy(0, places, values).view(rows, width, *values.shape[1:])
        return sum_of_parts(own, self.documents.group)


def _on_device(value: Documents | ModelInput, device: torch.device) -> dict[str, Any]:
    moved: dict[str, Any] = {}
    for name, each in vars(value).items():
        if isinstance(each, Documents):
            moved[name] = each.to(device)
        elif isinstance(each, Tensor):
            moved[name] = to_device(each, device)
    return moved
