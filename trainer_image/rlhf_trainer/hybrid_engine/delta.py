"""Lossless delta encoding of weights: only elements that changed since the last exchange are sent.

A message has a bit for each element, then the new values of changed elements. Elements are compared by their bits.
A small update changes few of the bfloat16 values of a model.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rlhf_trainer.generation.checksum import BITS

FULL_EVERY = 100
"""Interval, in exchanges, at which all values are sent, not only changed ones."""
PLACES = 8
"""Elements per byte of a message's mask of changes, and the alignment of each section of the message in bytes."""


@dataclass
class Arrival:
    """A running collective of messages; `wait` decodes them."""

    work: dist.Work | None
    parts: Sequence[tuple[Tensor, Tensor]]
    """(message, part of `known` that the message changes)."""
    known: Tensor
    received: Tensor

    def wait(self) -> None:
        """Wait for the messages and decode them; further calls do nothing."""
        if self.work is None:
            return
        self.work.wait()
        self.work = None
        for message, part in self.parts:
            decode(message, part)
        self.received.copy_(self.known)


class Changes:
    """Exchange of changed elements of flat tensors in a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self._times = group, Counter[int]()
        self._last: dict[int, tuple[Tensor, Tensor]] = {}
        """Step of the reshard -> copies of the tensors that the step last sent and received."""

    def exchange(
        self, step: int, sent: Tensor, received: Tensor, sizes: Sequence[Sequence[int]]
    ) -> tuple[Arrival, tuple[int, int], bool]:
        """Start an exchange; returns (work whose `wait` fills `received`, (bytes sent, received), is_full).

        is_full: all values are sent. sizes: bytes to each rank, and bytes from each rank, before encoding.
        """
        last, known = self._last.setdefault(step, (torch.empty_like(sent), torch.empty_like(received)))
        given, got = ([size // sent.itemsize for size in each] for each in sizes)
        is_whole = self._times[step] % FULL_EVERY == 0
        messages = [
            encoded(new, None if is_whole else old)
            for new, old in zip(torch.split(sent, given), torch.split(last, given), strict=True)
        ]
        lengths = torch.tensor([len(message) for message in messages], device=sent.device)
        theirs = torch.empty_like(lengths)
        dist.all_to_all_single(theirs, lengths, group=self._group)
        incoming = torch.empty(int(theirs.sum()), dtype=torch.uint8, device=sent.device)
        work = dist.all_to_all_single(
            incoming, torch.cat(messages), theirs.tolist(), lengths.tolist(), group=self._group, async_op=True
        )
        last.copy_(sent)
        self._times[step] += 1
        parts = list(zip(torch.split(incoming, theirs.tolist()), torch.split(known, got), strict=True))
        return Arrival(work, parts, known, received), (int(lengths.sum()), len(incoming)), is_whole


def encoded(new: Tensor, old: Tensor | None) -> Tensor:
    """Encode the changes from `old` to `new` as uint8 [n], or all of `new` if that is shorter or `old` is None.

    The first 8 bytes are the number of changed elements, -1 for all of `new`. new, old: [N], floats of one type.
    """
    bits = new.view(BITS[new.itemsize])
    count, sections = -1, [bits]
    if old is not None:
        changed = bits != old.view(bits.dtype)
        values, mask = bits[changed], _packed(changed)
        if mask.numel() + values.nbytes < new.nbytes:
            count, sections = len(values), [mask, values]
    head = torch.full((1,), count, dtype=torch.int64, device=new.device)
    parts = [section.view(torch.uint8) for section in (head, *sections)]
    aligned = [(part, part.new_zeros(-len(part) % PLACES)) for part in parts]  # `decode` views sections as wider types
    return torch.cat([each for pair in aligned for each in pair])


def decode(message: Tensor, known: Tensor) -> None:
    """Decode a message into `known`, in place: overwrite the changed elements or, by a full message, all elements."""
    count = int(message[:PLACES].view(torch.int64))
    bits, rest = known.view(BITS[known.itemsize]), message[PLACES:]
    if count < 0:
        bits.copy_(rest[: known.nbytes].view(bits.dtype))
        return
    masked = -(-known.numel() // PLACES)
    changed = (rest[:masked, None] >> torch.arange(PLACES, dtype=torch.uint8, device=rest.device)) & 1
    start = masked + -masked % PLACES
    bits[changed.flatten()[: known.numel()].bool()] = rest[start : start + count * bits.itemsize].view(bits.dtype)


def _packed(mask: Tensor) -> Tensor:
    """Pack 8 elements of a bool tensor in a byte of uint8, the first in the lowest bit."""
    padded = pad(mask.to(torch.uint8), (0, -len(mask) % PLACES)).view(-1, PLACES)
    weights = 2 ** torch.arange(PLACES, dtype=torch.uint8, device=mask.device)
    return (padded * weights).sum(1, dtype=torch.uint8)
