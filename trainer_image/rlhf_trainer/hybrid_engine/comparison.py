"""What HybridFlow is compared with: HybridFlow-V and DS-Chat gather the whole model, then keep a shard of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.boxes import Box
from rlhf_trainer.hybrid_engine.exchange import Piece
from rlhf_trainer.hybrid_engine.layout import Boxes, Parameter, generation_boxes, training_boxes
from rlhf_trainer.hybrid_engine.plan import ReshardPlan, addresses, plan

Mode = Literal["HybridFlow", "HybridFlow-V", "DS-Chat"]
MODES: tuple[Mode, ...] = ("HybridFlow", "HybridFlow-V", "DS-Chat")


@dataclass(frozen=True)
class Transition:
    """A way from training to generation."""

    plan: ReshardPlan
    """Its destinations are what a rank brings together: its generation shard, or the whole model."""
    kept: Sequence[Boxes]
    """What each rank generates with."""


def transition(mode: Mode, model: Sequence[Parameter], layout: ParallelSizes, *, shards: int = 1) -> Transition:
    """The way of a mode. DS-Chat's weights are always sharded over all ranks (ZeRO-3), whatever `shards` says."""
    shards = layout.data if mode == "DS-Chat" else shards
    sources = dict(enumerate(training_boxes(model, layout, shards=shards)))
    kept = generation_boxes(model, layout, "interval" if mode == "HybridFlow" else "consecutive")
    whole = {parameter.name: Box.whole(parameter.shape) for parameter in model}
    destinations = dict(enumerate(kept)) if mode == "HybridFlow" else dict.fromkeys(sources, whole)
    return Transition(plan(sources, destinations, addresses(layout, shards=shards)), kept)


def assembled(pieces: Iterable[Piece], boxes: Mapping[str, Box], like: Tensor) -> dict[str, Tensor]:
    """The pieces put together: name -> tensor of the shape of its box, of the type and on the device of `like`."""
    found = {name: torch.empty(box.shape, dtype=like.dtype, device=like.device) for name, box in boxes.items()}
    for name, box, piece in pieces:
        found[name][box.within(boxes[name])] = piece
    return found
