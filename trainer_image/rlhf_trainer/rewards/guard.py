"""The process of a user's function, and a guard around it: `python -m rlhf_trainer.rewards.guard SOCKET ENTRYPOINT`.

The guard runs no code of the user's. When the trainer closes its end of the socket, or is killed, or the function's
process ends, the guard ends that process and all that it has started, and then itself in the same way. So neither an
endless loop in C nor a forgotten pool of processes outlives a run. Only modules that are quick to import are used here.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_trainer.rewards.channel import receive, send
from rlhf_trainer.rewards.score import EXPECTED, is_score

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STRAY_MILLISECONDS = 1000
"""How often the guard buries orphans of the function's that have ended."""
SHOWN = 300
"""Characters of an error's text that are told."""
NOT_THEIRS = ("<", __file__, importlib.__file__)
"""How the files begin that stand in a traceback and are not the user's."""


def main(channel: socket.socket, entrypoint: str) -> None:
    """Start the function's process and outlive it; never returns."""
    channel.set_inheritable(False)
    _control_process(PR_SET_CHILD_SUBREAPER, 1)  # what the function starts and leaves becomes a child of this process
    function = os.fork()
    if function == 0:
        _control_process(PR_SET_PDEATHSIG, signal.SIGKILL)
        serve(channel, entrypoint)
        os._exit(0)
    status = _watch(function, channel)
    _end_descendants()
    _end_as(os.waitstatus_to_exitcode(status))


def _control_process(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _watch(function: int, channel: socket.socket) -> int:
    """Wait until the trainer hangs up (0) or the function's process ends (its status)."""
    events = select.poll()
    events.register(channel, 0)  # nothing but POLLHUP
    events.register(os.pidfd_open(function), select.POLLIN)
    while True:
        is_over = any(kind & select.POLLHUP for _, kind in events.poll(STRAY_MILLISECONDS))
        buried = dict(_bury())
        if function in buried or is_over:
            return buried.get(function, 0)


def _bury() -> Iterator[tuple[int, int]]:
    """(process, status) of each child that has ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _end_descendants() -> None:
    """Kill and bury every descendant; those of a killed one become children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with suppress(ChildProcessError):
        while True:
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def _end_as(code: int) -> None:
    """End with an exit code, or by the signal of which it is the negative."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(channel: socket.socket, entrypoint: str) -> None:
    """Import the function, say so, and answer calls until the trainer hangs up.

    An answer is {"values": [float, ...]} or {"problem": what the function did, "place": place of the sample, if known}.
    """
    problem, function = "", _no_function
    try:
        function = _imported(entrypoint)
    except BaseException as error:  # noqa: BLE001 whatever the user's module does
        problem = f"cannot be imported: {_told(error)}"
    send(channel, {"problem": problem})
    mine = os.getpid()
    with suppress(EOFError):
        while True:
            answer = _answer(function, receive(channel))
            if os.getpid() != mine:  # the function has forked and came back in both processes
                return
            send(channel, answer)


def _no_function(*_: Any, **__: Any) -> None:
    """Stands for the function until it is imported."""


def _imported(entrypoint: str) -> Callable[..., Any]:
    module, _, name = entrypoint.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"it is {_kind(function)}, not a function")
    return function


def _answer(function: Callable[..., Any], call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        returned = function(call["prompts"], call["responses"], call["finished"], **call["arguments"])
        return _judged(returned, count=len(call["prompts"]))
    except BaseException as error:  # noqa: BLE001 SystemExit as well: whatever the user's code raises
        return {"problem": f"raised {_told(error)}"}


def _judged(returned: Any, *, count: int) -> dict[str, Any]:
    """What was returned as an answer: `count` scores, in order, or what is wrong with it."""
    if isinstance(returned, str | bytes | Mapping | AbstractSet) or not isinstance(returned, Iterable):
        return {"problem": f"returned {_kind(returned)}, expected a list with a number for each response"}
    values = list(islice(returned, count + 1))
    if len(values) != count:
        found = f"{len(values)} values" if len(values) < count else f"more than {count} values"
        return {"problem": f"returned {found} for {count} responses"}
    numbers = [None if isinstance(value, str | bytes) else _number(value) for value in values]
    for place, (value, number) in enumerate(zip(values, numbers, strict=True)):
        if number is None:
            return {"problem": f"returned {_kind(value)}, expected a number", "place": place}
        if not is_score(number):
            return {"problem": f"returned {number}, expected {EXPECTED}", "place": place}
    return {"values": numbers}


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _number(value: Any) -> float | None:
    """A number of any library as a float; None for what is no number, or is too large for one."""
    with suppress(TypeError, ValueError, OverflowError):
        return float(value)
    return None


def _told(error: BaseException) -> str:
    """An error in one line: its class, its text, and the innermost line of its traceback."""
    text = " ".join(str(error).split())[:SHOWN]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(NOT_THEIRS)]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    told = f"{type(error).__name__}{': ' if text else ''}{text}{where}"
    return told.encode(errors="backslashreplace").decode()  # half a surrogate pair can be written nowhere


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
