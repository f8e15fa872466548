"""Forward and backward passes over micro-batches, without pipelining: this rank holds the model from end to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_trainer.training.model_input import ModelInput, Text
from rlhf_trainer.types import Fields

TextsFunction = Callable[[Fields], Sequence[Text]]
"""Fields of a micro-batch -> what the model reads of them, each with the same number of rows b."""
OutputFunction = Callable[[Any, Fields], Tensor]
"""(the model's output on all texts, one below the other; fields of the micro-batch) -> a loss, or a tensor [b, t].

The output is a `Likelihood` of tensors [rows, T], or a scorer's scores [rows, T].
"""
BeforeBackward = Callable[[bool], None]
"""Called before each backward pass of an update with whether it is the last one."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Some rows of the batch on the device, cut to their longest row."""

    fields: Fields
    """Each field [b, t] or [b]."""
    given: ModelInput
    rows: Tensor
    """int64 [b]: which rows of the rank's batch these are; empty for padding, with which a rank joins collectives."""


class NoPipelining:
    """Runs one micro-batch after the other."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def forward(self, micros: Sequence[MicroBatch], compute: OutputFunction) -> list[Tensor]:
        """`compute` of each micro-batch."""
        return [compute(self._model(micro.given.tokens, micro.given), micro.fields) for micro in micros]

    def forward_backward(
        self, micros: Sequence[MicroBatch], loss: OutputFunction, before_backward: BeforeBackward
    ) -> list[Tensor]:
        """The losses of the micro-batches, after their backward passes."""
        losses = []
        for number, micro in enumerate(micros, start=1):
            share = loss(self._model(micro.given.tokens, micro.given), micro.fields)
            before_backward(number == len(micros))
            torch.autograd.backward(share)
            losses.append(share.detach())
        return losses
