"""What a model reads of a micro-batch, and which of its tokens are read: made on the host, so that shapes are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from rlhf_trainer.types import Fields, concatenate


@dataclass(frozen=True, kw_only=True)
class Text:
    """Texts that a model reads, and of which tokens a loss reads the log-probabilities."""

    tokens: Tensor
    """int64 [b, T], padded on the right."""
    lengths: Tensor
    """int64 [b]: tokens of each row that are no padding."""
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
    """Where the documents lie that are packed side by side; none sees another."""

    lengths: tuple[int, ...]
    """Tokens of each document, in their order; together all N."""
    starts: Tensor
    """int32 [documents + 1]: 0, the end of the first, .., N."""

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return replace(self, starts=to_device(self.starts, device))


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """The texts of a micro-batch packed to one row of N tokens without their padding; n tokens of them are read.

    What belongs to tokens is put back at its place in rows of T tokens, one text below the other.
    """

    tokens: Tensor
    """int64 [1, N]."""
    positions: Tensor
    """int64 [1, N]: of each token in its document."""
    documents: Documents
    shape: tuple[int, int]
    """(rows, T)."""
    whole: Tensor
    """int64 [N, less padding]: which of the rows * T tokens each packed one is."""
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

        The first token of a text, which nothing predicts, is not read.
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
        inside = torch.arange(tokens.shape[1]) < lengths[:, None]
        whole, places = inside.flatten().nonzero()[:, 0], (read * inside).flatten().nonzero()[:, 0]
        padding = max(0, at_least - len(whole))
        documents = [length for length in (*lengths.tolist(), padding) if length]
        return cls(
            tokens=torch.cat([tokens[inside], tokens.new_zeros(padding)])[None],
            positions=torch.cat([torch.arange(length) for length in documents])[None],
            documents=Documents(tuple(documents), torch.tensor([0, *documents]).cumsum(0).int()),
            shape=(tokens.shape[0], tokens.shape[1]),
            whole=whole,
            places=places,
            before=(inside.flatten().cumsum(0) - 2)[places],
            targets=tokens.flatten()[places],
            temperature=read.flatten()[places],
            entropy=any(text.entropy for text in texts),
        )

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        moved: dict[str, Any] = {
            name: to_device(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, documents=self.documents.to(device), **moved)

    def unpacked(self, values: Tensor, places: Tensor) -> Tensor:
        """Zeros [rows, T] with these values at those places."""
        rows, width = self.shape
        return values.new_zeros(rows * width).index_copy(0, places, values).view(rows, width)
