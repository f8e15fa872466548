"""Sends what changed since it was last sent, without loss: a bit for each element, then the new values.

After a small update few of the bfloat16 values of a model are others than before. Elements are compared by their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

FULL_EVERY = 100
"""Of so many exchanges one is of everything."""

BITS = {2: torch.int16, 4: torch.int32}
"""By the size of an element, the type whose values are its bits."""
PLACES = 8
"""Elements of a byte of the mask, and the alignment of each section in bytes."""


class Waiting(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


@dataclass
class Last:
    """What a step of an exchange has sent and received, and how often."""

    sent: Tensor
    received: Tensor
    times: int = 0


class Changes:
    """Exchanges flat tensors of the ranks of a group, step by step. It keeps as many bytes as are sent and received."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._steps: dict[int, Last] = {}

    def exchange(
        self, step: int, sent: Tensor, received: Tensor, sizes: Sequence[Sequence[int]]
    ) -> tuple[Waiting, tuple[int, int], bool]:
        """Fill `received`, once that is waited for; how many bytes are sent and received; whether all values are.

        sizes: bytes to each rank and from each rank, before they are encoded.
        """
        last = self._steps.setdefault(step, Last(torch.empty_like(sent), torch.empty_like(received)))
        given, got = ([size // sent.itemsize for size in each] for each in sizes)
        is_whole = last.times % FULL_EVERY == 0
        messages = [
            encoded(new, None if is_whole else old)
            for new, old in zip(torch.split(sent, given), torch.split(last.sent, given), strict=True)
        ]
        lengths = torch.tensor([len(message) for message in messages], device=sent.device)
        theirs = torch.empty_like(lengths)
        dist.all_to_all_single(theirs, lengths, group=self._group)
        incoming = torch.empty(int(theirs.sum()), dtype=torch.uint8, device=sent.device)
        work = dist.all_to_all_single(
            incoming, torch.cat(messages), theirs.tolist(), lengths.tolist(), group=self._group, async_op=True
        )
        last.sent.copy_(sent)
        last.times += 1
        parts = list(zip(torch.split(incoming, theirs.tolist()), torch.split(last.received, got), strict=True))
        return Arrival(work, parts, last.received, received), (int(lengths.sum()), len(incoming)), is_whole


class Arrival:
    """Messages under way, which are decoded when they are there."""

    def __init__(
        self, work: dist.Work, parts: Sequence[tuple[Tensor, Tensor]], known: Tensor, received: Tensor
    ) -> None:
        """parts: (message, the part of what is known that it changes)."""
        self._work: dist.Work | None = work
        self._parts, self._known, self._received = parts, known, received

    def wait(self) -> None:
        """As often as one likes."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        for message, part in self._parts:
            decode(message, part)
        self._received.copy_(self._known)


def encoded(new: Tensor, old: Tensor | None) -> Tensor:
    """uint8 [n]: the changes from `old` to `new`, or all of `new` where that is less or nothing is known.

    The first 8 bytes are the number of changed elements, -1 for all. Both [N] of the same floating-point type.
    """
    bits = new.view(BITS[new.itemsize])
    if old is not None:
        changed = bits != old.view(bits.dtype)
        values = bits[changed]
        mask = _packed(changed)
        if mask.numel() + values.nbytes < new.nbytes:
            return _joined(len(values), [mask, values])
    return _joined(-1, [bits])


def decode(message: Tensor, known: Tensor) -> None:
    """Make of `known`, which is what was there before, what was encoded; nothing of it is read if all has come."""
    count = int(message[:PLACES].view(torch.int64))
    bits, rest = known.view(BITS[known.itemsize]), message[PLACES:]
    if count < 0:
        bits.copy_(rest[: known.nbytes].view(bits.dtype))
        return
    masked = -(-known.numel() // PLACES)
    changed = (rest[:masked, None] >> torch.arange(PLACES, dtype=torch.uint8, device=rest.device)) & 1
    start = _aligned(masked)
    bits[changed.flatten()[: known.numel()].bool()] = rest[start : start + count * bits.itemsize].view(bits.dtype)


def _packed(mask: Tensor) -> Tensor:
    """uint8: 8 elements of a bool tensor a byte, the first in the lowest bit."""
    padded = pad(mask.to(torch.uint8), (0, -len(mask) % PLACES)).view(-1, PLACES)
    weights = 2 ** torch.arange(PLACES, dtype=torch.uint8, device=mask.device)
    return (padded * weights).sum(1, dtype=torch.uint8)


def _joined(count: int, sections: list[Tensor]) -> Tensor:
    """The count and the sections, each from a place at which any type may be viewed."""
    lengths = [PLACES, *(_aligned(section.nbytes) for section in sections)]
    message = torch.zeros(sum(lengths), dtype=torch.uint8, device=sections[0].device)
    message[:PLACES].view(torch.int64)[0] = count
    start = PLACES
    for section, length in zip(sections, lengths[1:], strict=True):
        message[start : start + section.nbytes] = section.view(torch.uint8)
        start += length
    return message


def _aligned(size: int) -> int:
    return -(-size // PLACES) * PLACES
