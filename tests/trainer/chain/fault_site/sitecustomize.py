"""Python imports this first in every process of a run that has a fault: it makes the fault happen, once, in rank 1.

RLHF_FAULT is `FOLDER|KIND|PHASE|STEP`; the folder gets a file `fired` when it happens. `wait` holds the rank until
a test writes the file `released`, so that a signal reaches the run in this step on a busy machine, too.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

DRIVER = "RLHF_FAULT_DRIVER"
FOREVER = 1000


def end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    time.sleep(FOREVER)  # what follows from it is awaited, not raced


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(FOREVER)  # another thread may take the signal


def end_part_of_ray(name: str) -> None:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command, parent = (entry / "cmdline").read_bytes(), (entry / "stat").read_text().rpartition(")")[2].split()
            if name.encode() in command.split(b"\0")[0] and parent[1] == os.environ[DRIVER]:
                end(int(entry.name))


def no_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB")


def no_number() -> None:
    """An element of the actor's weights becomes nan."""
    import torch

    slot = next(found for found in callers() if type(found).__name__ == "SlotProcess")
    with torch.no_grad():
        for weight in slot._workers["actor"].trainer.model.module.parameters():
            weight.to_local().view(-1)[:1] = torch.nan


def wrong_checksum() -> None:
    exchange: Any = import_module("rlhf_trainer.hybrid_engine.exchange")
    right = exchange.bit_sum

    def wrong(*arguments: Any) -> Any:
        exchange.bit_sum = right
        return right(*arguments) + 1

    exchange.bit_sum = wrong


def no_disk() -> None:
    state: Any = import_module("rlhf_trainer.training.saving")

    def full(path: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    state.write_piece = full


def wait() -> None:
    while not (Path(os.environ["RLHF_FAULT"].partition("|")[0]) / "released").exists():
        time.sleep(0.02)


FAULTS: dict[str, Callable[[], None]] = {
    "end the worker": lambda: end(os.getpid()),
    "stop the worker": stop,
    "end the controller": lambda: end(int(os.environ[DRIVER])),
    "end gcs_server": lambda: end_part_of_ray("gcs_server"),
    "end raylet": lambda: end_part_of_ray("raylet"),
    "no memory": no_memory,
    "no number": no_number,
    "wrong checksum": wrong_checksum,
    "no disk": no_disk,
    "tell": lambda: None,
    "wait": wait,
}


def callers() -> Iterator[Any]:
    """`self` of each method that is running, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame:
        yield frame.f_locals.get("self")
        frame = frame.f_back


def arm(folder: Path, kind: str, phase: str, step: int) -> None:
    """Have it happen when rank 1 begins with the phase, or span, in the step; a step begins with its reshard."""
    from rlhf_trainer.telemetry import Recorder

    span, steps = Recorder.span, 0

    def faulty(recorder: Recorder, now: str, name: str = "", *, since: float | None = None) -> Any:
        nonlocal steps
        steps += now == "reshard"
        if (recorder.rank, steps) == (1, step) and phase in (now, name):
            with suppress(FileExistsError):
                (folder / "fired").touch(exist_ok=False)
                FAULTS[kind]()
        return span(recorder, now, name, since=since)

    Recorder.span = faulty  # type: ignore[method-assign,assignment]


if asked := os.environ.get("RLHF_FAULT"):
    place, what, where, when = asked.split("|")
    if "rlhf_trainer" in sys.orig_argv:  # python -m rlhf_trainer
        os.environ[DRIVER] = str(os.getpid())
    arm(Path(place), what, where, int(when))
