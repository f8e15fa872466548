"""Lossless delta encoding of weights: only elements that changed since the last exchange are sent.

A message has a bit for each element, then the new values. A small update changes few of the bfloat16 values of a model.
Elements are compared by their bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

FULL_EVERY = 100
"""Interval, in exchanges, at which all values are sent, not only changed ones."""

BITS = {2: torch.int16, 4: torch.int32}
"""Size of a weight's element in bytes -> integer type of the same size, by which elements' bits are compared."""
PLACES = 8
"""Elements per byte of a message's mask of changes, and the alignment of each section of the message in bytes."""


class Waiting(Protocol):
    """A running collective whose end can be awaited."""

    def wait(self) -> object: ...


@dataclass
class StepState:
    """Copies of the tensors that a step of the reshard last sent and received, and the number of times that it ran."""

    sent: Tensor
    received: Tensor
    times: int = 0


class Changes:
    """Exchange of changed elements of flat tensors in a group; keeps a copy of the last sent and received tensors."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._steps: dict[int, StepState] = {}

    def exchange(
        self, step: int, sent: Tensor, received: Tensor, sizes: Sequence[Sequence[int]]
    ) -> tuple[Waiting, tuple[int, int], bool]:
        """Start an exchange; returns (work whose `wait` fills `received`, (bytes sent, received), is_full).

        is_full: all values are sent. sizes: bytes to each rank, and bytes from each rank, before encoding.
        """
        last = self._steps.setdefault(step, StepState(torch.empty_like(sent), torch.empty_like(received)))
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
    """A running collective of messages; `wait` decodes them."""

    def __init__(
        self, work: dist.Work, parts: Sequence[tuple[Tensor, Tensor]], known: Tensor, received: Tensor
    ) -> None:
        """parts: (message, part of `known` that the message changes)."""
        self._work: dist.Work | None = work
        self._parts, self._known, self._received = parts, known, received

    def wait(self) -> None:
        """Wait for the messages and decode them; further calls do nothing."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        for message, part in self._parts:
            decode(message, part)
        self._received.copy_(self._known)


def encoded(new: Tensor, old: Tensor | None) -> Tensor:
    """Encode the changes from `old` to `new` as uint8 [n], or all of `new` if that is shorter or `old` is None.

    The first 8 bytes are the number of changed elements, -1 for all of `new`. new, old: [N], floats of one type.
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
    """Decode a message into `known`, in place: overwrite the changed elements or, by a full message, all elements."""
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
    """Pack 8 elements of a bool tensor in a byte of uint8, the first in the lowest bit."""
    padded = pad(mask.to(torch.uint8), (0, -len(mask) % PLACES)).view(-1, PLACES)
    weights = 2 ** torch.arange(PLACES, dtype=torch.uint8, device=mask.device)
    return (padded * weights).sum(1, dtype=torch.uint8)


def _joined(count: int, sections: list[Tensor]) -> Tensor:
    """Join the number of changed elements and a message's sections, which are aligned for views of any type."""
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
