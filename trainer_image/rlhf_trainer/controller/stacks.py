"""Who is to blame when a rank hangs or dies: every rank is asked what it does, and their stacks go into one file."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_trainer.errors import CommunicationError

WAITING = ("/torch/distributed/", "/rlhf_trainer/training/state.py")
"""Code in which a rank waits for others: collectives, and the end of a checkpoint."""
INNERMOST = 4
"""Frames of a stack that are searched for it: a collective's wrappers lie above it."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What a process does at this moment."""

    call: str
    """The method of a worker that it runs; empty between calls."""
    line: str
    """File and line, function: where in our or the user's code it is."""
    waits: bool
    """Whether it waits for other ranks."""
    stacks: str
    """The Python stacks of all its threads."""


def sight(call: str, thread: int) -> Sight:
    """Look at this process, of which `thread` runs `call`."""
    frames = sys._current_frames()  # noqa: SLF001 the public faulthandler only writes to files
    names = {known.ident: known.name for known in threading.enumerate()}
    stacks = [
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in frames.items()
    ]
    inside = traceback.extract_stack(frames[thread]) if thread in frames else traceback.StackSummary()
    innermost = inside[-1] if inside else None
    return Sight(
        call=call,
        line=f"{innermost.filename}:{innermost.lineno}, {innermost.name}" if innermost else "",
        waits=any(part in frame.filename for frame in inside[-INNERMOST:] for part in WAITING),
        stacks="\n".join(stacks),
    )


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One rank as the controller sees it from outside."""

    name: str
    """Rank, pool and process."""
    last_call: str
    """The first call of the step that it has not finished; empty if it has finished all."""
    sight: Sight | None
    """What it answered; None if it did not."""
    is_dead: bool = False

    @property
    def state(self) -> str:
        """What it does, for a sentence."""
        where = f" in {self.last_call}" if self.last_call else ""
        if self.is_dead:
            return f"{self.name} died{where}"
        if self.sight is None:
            return f"{self.name} does not answer{where}"
        return f"{self.name} is in {self.sight.call} ({self.sight.line})"

    @property
    def is_busy(self) -> bool:
        """Whether it does not answer, or does something other than waiting for others."""
        return self.sight is None or bool(self.sight.call and not self.sight.waits)

    @property
    def is_waiting(self) -> bool:
        return self.sight is not None and bool(self.sight.call) and self.sight.waits


def diagnosed(error: CommunicationError, seats: Sequence[Seat], path: Path) -> CommunicationError:
    """The error with the ranks to blame in its sentence; the stacks of all ranks are written to `path`."""
    waiting = [seat for seat in seats if seat.is_waiting]
    blamed = [seat for seat in seats if seat.is_dead] or [seat for seat in seats if seat.is_busy] or waiting
    parts = [str(error), *(seat.state for seat in blamed)]
    if blamed is not waiting and waiting:
        parts.append(f"{', '.join(seat.name for seat in waiting)} waits for it")
    with suppress(OSError):  # the sentence matters more than the file
        path.write_text(
            "\n".join(f"=== {seat.state if seat.is_busy else seat.name}\n{_stacks(seat)}" for seat in seats)
        )
        parts.append(f"the stacks of all ranks are in {path}")
    return CommunicationError("; ".join(parts))


def _stacks(seat: Seat) -> str:
    return seat.sight.stacks if seat.sight else "no answer\n"
