"""What a model reads of a micro-batch, and which of its tokens are read: made on the host, so that shapes are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_trainer.types import Fields, concatenate

LEAST_SHARE = 16
"""A prompt of less than one part in so many of its row's tokens is not shared: a first token that all texts have would
tie all of them together, and ranks could not be dealt about as much."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Texts that a model reads, and of which tokens a loss reads the log-probabilities."""

    tokens: Tensor
    """int64 [b, T], padded on the right."""
    lengths: Tensor
    """int64 [b]: tokens of each row that are no padding."""
    prompts: Tensor | None = None
    """int64 [b]: tokens of each row's prompt, fewer than of the row; rows with one prompt compute it once. None: each
    row is computed whole."""
    read: Tensor | None = None
    """[b, T]: above 0 where a language model's log-probability is wanted; a scorer scores every token."""
    temperature: float = 1.0
    """By which logits are divided."""
    entropy: bool = False
    """Whether the entropies of the tokens that are read are wanted too."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The same there. The host does not wait for a GPU, which copies from pinned memory; no GPU has confirmed it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class FieldsOnDevice(Mapping[str, Tensor]):
    """The fields of a micro-batch, each copied to the device when it is first read."""

    def __init__(self, on_host: Fields, device: torch.device) -> None:
        self._on_host, self._device = on_host, device
        self._copied: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._copied:
            self._copied[name] = to_device(self._on_host[name], self._device)
        return self._copied[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._on_host)

    def __len__(self) -> int:
        return len(self._on_host)


@dataclass(frozen=True)
class Documents:
    """Where the documents lie that are packed side by side; of another one each sees the prompt that it shares only."""

    lengths: tuple[int, ...]
    """Tokens of each document, in their order; together all N."""
    starts: Tensor
    """int32 [documents + 1]: 0, the end of the first, .., N."""
    seen: tuple[int, ...]
    """Tokens that the last one of each document sees: its prompt, where another document has it, and its own."""
    seen_starts: Tensor
    """int32 [documents + 1]: 0, the end of those that the first document sees, .., their sum."""
    seen_tokens: Tensor | None
    """int64 [sum of seen]: which of the N these are, document by document; None: each sees its own tokens alone."""

    @classmethod
    def of(cls, sizes: Tensor, seen_tokens: Tensor | None) -> Self:
        """From the tokens of each document and those that its last token sees: int64 [2, documents]."""
        lengths, seen = (tuple(each) for each in sizes.tolist())
        starts, seen_starts = pad(sizes.cumsum(1), (1, 0)).int()
        return cls(lengths, starts, seen, seen_starts, seen_tokens)

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return replace(self, **_on_device(self, device))


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """The texts of a micro-batch packed to one row of N tokens without their padding; n tokens of them are read.

    The prompt of rows that share one is packed once, with the first of them, whose keys and values the others see. What
    belongs to tokens is put back at its place in rows of T tokens, one text below the other.
    """

    tokens: Tensor
    """int64 [1, N]."""
    positions: Tensor
    """int64 [1, N]: of each token in its text."""
    documents: Documents
    shape: tuple[int, int]
    """(rows, T)."""
    padding: int
    """How many of the N, at their end, are of no text."""
    whole: Tensor
    """int64 [m]: which of the rows * T tokens are no padding."""
    packed: Tensor
    """int64 [m]: which of the N each of these is; tokens of a shared prompt are one."""
    places: Tensor
    """int64 [n]: which of the rows * T tokens are read."""
    before: Tensor
    """int64 [n]: which of the N is before each token that is read."""
    targets: Tensor
    """int64 [n]: the tokens that are read."""
    temperature: Tensor
    """float32 [n]."""
    entropy: bool

    @classmethod
    def of(cls, texts: Sequence[Text], *, at_least: int = 1) -> Self:
        """Packed to at least so many tokens: what is missing is a document of zeros, which nothing reads.

        The first token of a text, which nothing predicts, is not read. Rows that share the prompt of another come last.
        """
        tokens = concatenate([text.tokens for text in texts])
        lengths = torch.cat([text.lengths for text in texts])
        read = torch.zeros(tokens.shape)  # the temperature of each token that is read
        first = 0
        for text in texts:
            rows, width = text.tokens.shape
            if text.read is not None:
                read[first : first + rows, 1:width] = text.temperature * (text.read[:, 1:] > 0)
            first += rows
        column = torch.arange(tokens.shape[1])
        inside = column < lengths[:, None]
        with_prompt, shared = _shared_prompts(texts)
        order = (shared > 0).int().argsort(stable=True)
        own = lengths - shared
        starts = torch.empty_like(own)
        starts[order] = own[order].cumsum(0) - own[order]
        packed = (starts - shared)[:, None] + column
        packed = torch.where(column < shared[:, None], packed[with_prompt], packed)
        computed = (inside & (column >= shared[:, None]))[order]
        padding = max(0, at_least - (total := int(own.sum())))
        seen_tokens = torch.cat([packed[order][inside[order]], torch.arange(total, total + padding)])
        documents = order[own[order] > 0]
        sizes = torch.stack([own, lengths])[:, documents]
        places = (read * inside).flatten().nonzero()[:, 0]
        return cls(
            tokens=torch.cat([tokens[order][computed], tokens.new_zeros(padding)])[None],
            positions=torch.cat([computed.nonzero()[:, 1], torch.arange(padding)])[None],
            documents=Documents.of(
                pad(sizes, (0, int(padding > 0)), value=padding), seen_tokens if shared.any() else None
            ),
            shape=(tokens.shape[0], tokens.shape[1]),
            padding=padding,
            whole=inside.flatten().nonzero()[:, 0],
            packed=packed[inside],
            places=places,
            before=packed.flatten()[places - 1],
            targets=tokens.flatten()[places],
            temperature=read.flatten()[places],
            entropy=any(text.entropy for text in texts),
        )

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return replace(self, documents=self.documents.to(device), **_on_device(self, device))

    def unpacked(self, values: Tensor, places: Tensor) -> Tensor:
        """Zeros [rows, T] with these values at those places."""
        rows, width = self.shape
        return values.new_zeros(rows * width).index_copy(0, places, values).view(rows, width)


def prompt_sizes(text: Text) -> Tensor:
    """int64 [b]: tokens of each row's prompt that other rows may share; 0 where that saves next to nothing."""
    if text.prompts is None:
        return torch.zeros_like(text.lengths)
    return torch.where(text.prompts * LEAST_SHARE < text.lengths, 0, text.prompts)


def prompt_keys(text: Text) -> list[bytes]:
    """A value for the prompt of each row, equal where prompts are; empty where there is none to share."""
    return [row[:size].tobytes() for row, size in zip(text.tokens.numpy(), prompt_sizes(text).tolist(), strict=True)]


def _shared_prompts(texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """(the first row with the prompt of each row, tokens that it takes from there), over the rows of all texts."""
    found: dict[bytes, int] = {}
    keys = chain.from_iterable(map(prompt_keys, texts))
    rows = torch.tensor([found.setdefault(key, row) for row, key in enumerate(keys)])
    return rows, torch.where(rows < torch.arange(len(rows)), torch.cat(list(map(prompt_sizes, texts))), 0)


def _on_device(value: Documents | ModelInput, device: torch.device) -> dict[str, Any]:
    """Its tensors on a device."""
    return {name: to_device(each, device) for name, each in vars(value).items() if isinstance(each, Tensor)}
