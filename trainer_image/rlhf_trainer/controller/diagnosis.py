"""Search for the ranks that make a run hang: every rank is asked what it does, and all stacks go to one file."""

import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhf_trainer.errors import CommunicationError

WAITING = ("/torch/distributed/", "/rlhf_trainer/training/saving.py")
"""Parts of file paths: a rank with its innermost frames in such files waits for other ranks or a checkpoint's end."""
WRITING = {"save_model", "_put_together", "write_weights", "save_config_and_tokenizer"}
"""Functions in the files of WAITING that write to a disk: a rank inside one of them works and does not wait."""
INNERMOST = 4
"""Number of a stack's innermost frames that are searched for WAITING: a collective may call other functions."""


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """State of a worker's process at the moment of the inspection."""

    call: str
    """Worker method that the process runs; empty between calls."""
    line: str
    """Innermost frame of the running call: file and line, function."""
    waits: bool
    stacks: str
    quiet_seconds: float
    """Seconds since this worker's process last ended a call."""


def inspect_process(call: str, thread: int, *, quiet_seconds: float) -> ProcessState:
    """Return the state of this process, whose thread `thread` runs the worker method `call`."""
    frames = sys._current_frames()  # noqa: SLF001 the public faulthandler only writes to files
    names = {known.ident: known.name for known in threading.enumerate()}
    stacks = [
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in frames.items()
    ]
    inside = traceback.extract_stack(frames[thread]) if thread in frames else traceback.StackSummary()
    return ProcessState(
        call=call,
        line=f"{inside[-1].filename}:{inside[-1].lineno}, {inside[-1].name}" if inside else "",
        waits=is_waiting(inside),
        stacks="\n".join(stacks),
        quiet_seconds=quiet_seconds,
    )


def is_waiting(stack: traceback.StackSummary) -> bool:
    """Whether a thread with this stack waits for other ranks, or for the end of a checkpoint."""
    innermost = [frame for frame in stack[-INNERMOST:] if any(part in frame.filename for part in WAITING)]
    return bool(innermost) and not any(frame.name in WRITING for frame in innermost)


@dataclass(frozen=True, kw_only=True)
class RankState:
    """State of one rank, for the message about a hang."""

    name: str
    host: str
    """Host name of the rank's machine, on a cluster of its pod; empty before the rank has joined."""
    last_call: str
    """Oldest unfinished call of the rank, or the candidates for it; empty if all calls have ended."""
    process: ProcessState | None
    """State that the rank's process reported; None if no report came in time."""
    is_dead: bool = False

    def __str__(self) -> str:
        """Return what the rank does (died, does not answer, is in a call), as part of a sentence."""
        where = f" in {self.last_call}" if self.last_call else ""
        if self.is_dead:
            return f"{self.name} died{where}"
        if self.process is None:
            return f"{self.name} does not answer{where}"
        return f"{self.name} is in {self.process.call} ({self.process.line})"

    @property
    def state(self) -> Literal["dead", "busy", "waiting", "idle"]:
        """State of the rank: a rank that does not answer is busy, a rank between two calls is idle."""
        if self.is_dead or self.process is None:
            return "dead" if self.is_dead else "busy"
        if not self.process.call:
            return "idle"
        return "waiting" if self.process.waits else "busy"


def diagnose(error: CommunicationError, ranks: Sequence[RankState], path: Path) -> CommunicationError:
    """Return the error with the blamed ranks in its message; write the stacks of all ranks to `path`.

    Dead ranks are blamed; if none is dead, the busy ranks; if all ranks wait, all of them. The error's `host` is the
    machine of the dead or busy ranks, if they are on one machine.
    """
    dead, busy, waiting = ([rank for rank in ranks if rank.state == state] for state in ("dead", "busy", "waiting"))
    blamed = dead or busy
    parts = [str(error), *map(str, blamed or waiting)]
    if blamed and waiting:
        parts.append(f"{', '.join(rank.name for rank in waiting)} waits for it")
    with suppress(OSError):  # the sentence matters more than the file
        path.write_text("\n".join(map(_stacks, ranks)))
        parts.append(f"the stacks of all ranks are in {path}")
    made, hosts = CommunicationError("; ".join(parts)), {rank.host for rank in blamed}
    if len(hosts) == 1:
        made.host = hosts.pop()
    return made


def _stacks(rank: RankState) -> str:
    stacks = rank.process.stacks if rank.process else "no answer\n"
    return f"=== {rank if rank.state in ('dead', 'busy') else rank.name}\n{stacks}"
