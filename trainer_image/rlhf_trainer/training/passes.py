"""Forward and backward passes over micro-batches, of a model that this rank holds from embedding to head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from rlhf_trainer.types import Fields

Reads = Callable[[Fields], Tensor]
"""Fields of a micro-batch -> the tokens that the model reads: int64 [b, T]."""
Compute = Callable[[Tensor, Fields], Tensor]
"""(the model's output on them, fields of the micro-batch) -> what is wanted of it."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Some rows of the batch on the device, cut to their longest row."""

    fields: Fields
    """Each field [b, t] or [b]."""
    rows: Tensor
    """int64 [b]: which rows of the given batch these are; empty for a rank that only keeps step with the others."""


class Passes(Protocol):
    """How a rank goes through micro-batches."""

    def infer(self, micros: Sequence[MicroBatch], reads: Reads, compute: Compute) -> list[Tensor]:
        """`compute` of each micro-batch."""
        ...

    def learn(self, micros: Sequence[MicroBatch], reads: Reads, loss: Compute) -> list[Tensor]:
        """The losses of the micro-batches, after the backward pass of each."""
        ...


class WholeModel:
    """One micro-batch after the other."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def infer(self, micros: Sequence[MicroBatch], reads: Reads, compute: Compute) -> list[Tensor]:
        """`compute` of each micro-batch."""
        return [compute(self._model(reads(micro.fields)), micro.fields) for micro in micros]

    def learn(self, micros: Sequence[MicroBatch], reads: Reads, loss: Compute) -> list[Tensor]:
        """The losses of the micro-batches, after the backward pass of each."""
        losses = []
        for micro in micros:
            share = loss(self._model(reads(micro.fields)), micro.fields)
            torch.autograd.backward(share)
            losses.append(share.detach())
        return losses


def tokens_of(fields: Fields) -> Tensor:
    """The field that most models read."""
    return fields["tokens"]
