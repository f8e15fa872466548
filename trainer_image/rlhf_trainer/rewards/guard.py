"""The process of a user's function, and a guard around it: `python -m rlhf_trainer.rewards.guard SOCKET ENTRYPOINT`.

What the process serves may be something else than a function (`main`): the episodes of an environment.

The guard runs no code of the user's. When the trainer closes its end of the socket, or is killed, or the function's
process ends, the guard kills that process and all that it has started, and then ends in the same way itself. So nothing
that the function started outlives a run, not even an endless loop in C. Imports here must be quick.

The socket carries JSON values, each after its length in bytes (4, big-endian).
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import json
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
from types import ModuleType
from typing import Any

from rlhf_trainer.rewards.sample import EXPECTED, is_score

ALWAYS_GIVEN = ("prompts", "responses", "finished")
"""Parameters of every function (`rlhf_api.spec.functions`, whose import takes longer than this process has)."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
REAP_MILLISECONDS = 1000
"""How often the guard reaps ended processes that the function started."""
SHOWN = 300
"""Characters of an error's text that a message shows."""
SCORE = "score"
"""The score among the parts of a response; a function that names none means the sum of its parts."""
MOST_PARTS = 16
"""Each part is two metrics."""
Serve = Callable[[socket.socket, str], None]
"""Serves what an entry point names until the trainer hangs up."""
OUR_FILES = ("<", __file__, importlib.__file__)
"""Prefixes of file names in a traceback that are not the user's."""


def main(channel: socket.socket, entrypoint: str, serve: Serve) -> None:
    """Fork the function's process, which serves it, and wait for its end; never returns."""
    channel.set_inheritable(False)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the function become children of this process
    function = os.fork()
    if function == 0:
        end_with_parent()
        _ignore_signals()
        serve(channel, entrypoint)
        os._exit(0)
    status = _watch(function, channel)
    _end_descendants()
    _end_as(os.waitstatus_to_exitcode(status))


def _ignore_signals() -> None:
    """Those that stop a run; by handlers, so that the programs that the function starts do not ignore them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def end_with_parent() -> None:
    """This process is killed when the one that has forked it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _watch(function: int, channel: socket.socket) -> int:
    """Wait until the trainer hangs up (0) or the function's process ends (its status)."""
    events = select.poll()
    events.register(channel, 0)  # nothing but POLLHUP
    events.register(os.pidfd_open(function), select.POLLIN)
    while True:
        is_over = any(kind & select.POLLHUP for _, kind in events.poll(REAP_MILLISECONDS))
        reaped = dict(_reap())
        if function in reaped or is_over:
            return reaped.get(function, 0)


def _reap() -> Iterator[tuple[int, int]]:
    """(process, status) of each child that has ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _end_descendants() -> None:
    """Kill and reap every descendant; orphans of a killed one become children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with suppress(ChildProcessError):
        while True:
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def _end_as(code: int) -> None:
    """End with an exit code; with a negative one by that signal."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(channel: socket.socket, entrypoint: str) -> None:
    """Import the function, say so, and answer calls until the trainer hangs up.

    An answer is {"scores": [(score, parts), ...]}, or {"problem": what the function did, "index": index of the sample,
    if known}.
    """
    problem, function = "", _no_function
    try:
        function = imported(entrypoint)
    except BaseException as error:  # noqa: BLE001 whatever the user's module does
        problem = f"cannot be imported: {described(error, module_of(entrypoint))}"
    send(channel, {"problem": problem})
    mine = os.getpid()
    with suppress(EOFError):
        while True:
            answer = _answer(function, receive(channel))
            if os.getpid() != mine:  # the function forked and returned in both processes
                return
            send(channel, answer)


def _no_function(*_: Any, **__: Any) -> None:
    """Stands for the function until it is imported."""


def imported(entrypoint: str) -> Callable[..., Any]:
    """What an entry point names, which can be called. TypeError if it cannot."""
    module, _, name = entrypoint.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"it is {kind_of(function)}, not a function")
    return function


def module_of(entrypoint: str) -> ModuleType | None:
    """The module that an entry point names, if it is imported."""
    return sys.modules.get(entrypoint.partition(":")[0])


def _answer(function: Callable[..., Any], call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        answer = _called(function, call)
    except BaseException as error:  # noqa: BLE001 SystemExit as well: whatever the user's code raises
        return {"problem": f"raised {described(error, function)}"}
    return {**answer, "problem": f"{answer['problem']}{place_of(function)}"} if "problem" in answer else answer


def _called(function: Callable[..., Any], call: Mapping[str, Any]) -> dict[str, Any]:
    given = {**_columns_for(function, call["columns"]), **call["arguments"]}
    if missing := _missing(function, given):
        return {"problem": f"needs {missing}, which is no column that the data names and no argument", "index": 0}
    returned = function(call["prompts"], call["responses"], call["finished"], **given)
    return _checked(returned, count=len(call["prompts"]))


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The function's parameters; None if it does not tell them."""
    with suppress(TypeError, ValueError):  # it is written in C
        return inspect.signature(function).parameters
    return None


def _columns_for(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that the function has parameters for, but those by whose names it is given something else."""
    parameters = _parameters(function) or {}
    by_position = {name for name, each in parameters.items() if each.kind is each.POSITIONAL_ONLY}
    others = {name: values for name, values in columns.items() if name in by_position or name not in ALWAYS_GIVEN}
    if not parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return others
    return {name: values for name, values in others.items() if name in parameters}


def _missing(function: Callable[..., Any], given: Mapping[str, Any]) -> str | None:
    """A keyword that the function must be given and is not."""
    parameters = (_parameters(function) or {}).items()
    needed = (name for name, each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty)
    return next((name for name in needed if name not in given), None)


def _checked(returned: Any, *, count: int) -> dict[str, Any]:
    """The answer for what the function returned: `count` scores in order, or what is wrong with it."""
    if isinstance(returned, str | bytes | Mapping | AbstractSet) or not isinstance(returned, Iterable):
        return {"problem": f"returned {kind_of(returned)}, expected a list with a number for each response"}
    values = list(islice(returned, count + 1))
    if len(values) != count:
        found = f"{len(values)} values" if len(values) < count else f"more than {count} values"
        return {"problem": f"returned {found} for {count} responses"}
    scores = []
    for index, value in enumerate(values):
        try:
            scores.append(_score(value))
        except ValueError as error:
            return {"problem": f"returned {error}", "index": index}
    if len({name for _, parts in scores for name in parts}) > MOST_PARTS:
        return {"problem": f"returned more than {MOST_PARTS} different parts", "index": 0}
    return {"scores": scores}


def _score(value: Any) -> tuple[float | None, dict[str, float | None]]:
    """The score of a response and its named parts; ValueError for what is no score."""
    if not isinstance(value, Mapping):
        return number_of(value), {}
    if names := [name for name in value if not (isinstance(name, str) and name.isidentifier())]:
        raise ValueError(f"a part named {str(names[0])[:SHOWN]!r}, expected letters, digits and '_'")
    parts = {name: number_of(part) for name, part in value.items()}
    if SCORE in parts:
        return parts.pop(SCORE), parts
    there = [part for part in parts.values() if part is not None]
    return number_of(sum(there)) if there else None, parts


def kind_of(value: Any) -> str:
    """What a value is, for a message."""
    return "None" if value is None else f"a value of type {type(value).__name__}"


def number_of(value: Any) -> float | None:
    """A number of any library as a float; ValueError for what is no number, or is not finite as float32."""
    if value is None:
        return None
    number = None
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # the last one is a tensor's
        number = None if isinstance(value, str | bytes) else float(value)
    if number is None:
        raise ValueError(f"{kind_of(value)}, expected a number")
    if not is_score(number):
        raise ValueError(f"{number}, expected {EXPECTED}")
    return number


def described(error: BaseException, failed: object, ours: tuple[str, ...] = OUR_FILES) -> str:
    """An error in one line: its class, its text, and the innermost line of its traceback that is not `ours`.

    failed: what was called, whose beginning is told where there is no such line.
    """
    told: object = error
    frames = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:  # the text ends with the file's name, without its folder
        told, frames = error.msg, [*frames, (error.filename, error.lineno)]
    text = ""
    with suppress(Exception):  # an error of the user's may have no text
        text = " ".join(str(told).split())[:SHOWN]
    theirs = [frame for frame in frames if not frame[0].startswith(ours)]
    where = " ({}:{})".format(*theirs[-1]) if theirs else place_of(failed)
    described = f"{type(error).__name__}{': ' if text else ''}{text}{where}"
    return described.encode(errors="backslashreplace").decode()  # a lone surrogate cannot be encoded


def place_of(what: object) -> str:
    """` (file:line)` of where a function or class of the user's begins, ` (file)` of a module; empty for ours."""
    if str(getattr(what, "__module__", None)).startswith("rlhf_trainer."):
        return ""
    from rlhf_api.own_code import defined_at  # its import takes longer than this process has, if all goes well

    return defined_at(what)


def send(channel: socket.socket, value: Any) -> None:
    """Write a value; OSError if the other end is gone or (TimeoutError) does not read."""
    body = json.dumps(value).encode()
    channel.sendall(len(body).to_bytes(4, "big") + body)


def receive(channel: socket.socket) -> Any:
    """The next value; EOFError if the other end is gone, TimeoutError after the socket's time limit."""
    return json.loads(_read(channel, int.from_bytes(_read(channel, 4), "big")))


def _read(channel: socket.socket, count: int) -> bytes:
    body = bytearray()
    while len(body) < count:
        part = channel.recv(count - len(body))
        if not part:
            raise EOFError
        body += part
    return bytes(body)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], serve)
