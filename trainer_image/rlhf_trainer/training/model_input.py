"""What a model reads of a micro-batch, and which of its tokens are read: made on the host, so that shapes are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from rlhf_trainer.types import concatenate


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


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """The texts of a micro-batch, one below the other, as a model takes them; n tokens of them are read."""

    tokens: Tensor
    """int64 [rows, T]."""
    places: Tensor
    """int64 [n]: which of the rows * T tokens."""
    targets: Tensor
    """int64 [n]: those tokens."""
    temperature: Tensor
    """float32 [n]."""
    entropy: bool

    @classmethod
    def of(cls, texts: Sequence[Text]) -> Self:
        """The first token of a text, which nothing predicts, is not read."""
        tokens = concatenate([text.tokens for text in texts])
        read = torch.zeros_like(tokens, dtype=torch.float32)  # the temperature of each token that is read
        first = 0
        for text in texts:
            rows, width = text.tokens.shape
            if text.read is not None:
                read[first : first + rows, 1:width] = text.temperature * (text.read[:, 1:] > 0)
            first += rows
        places = read.flatten().nonzero()[:, 0]
        return cls(
            tokens=tokens,
            places=places,
            targets=tokens.flatten()[places],
            temperature=read.flatten()[places],
            entropy=any(text.entropy for text in texts),
        )

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        tensors = {name: getattr(self, name).to(device) for name in ("tokens", "places", "targets", "temperature")}
        return replace(self, **tensors)
