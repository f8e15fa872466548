"""The processes of an environment: `python -m rlhf_trainer.environments.server SOCKET MODULE:NAME[,MODULE:NAME ...]`.

A process behind the guard of `rewards` imports the modules once, and forks a process for each episode. That makes an
object of the first name and answers on a socket of its own. So an episode that crashes or hangs ends alone, and what a
module holds after its import is there once for all.
"""

from __future__ import annotations

import asyncio  # here, as rlhf_api.own_code, and not in each episode's process: tens of milliseconds
import inspect
import json
import os
import random
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import rlhf_api.own_code  # noqa: F401 what a failure tells is made by it
from rlhf_trainer.rewards.guard import (
    OUR_FILES,
    described,
    end_with_parent,
    imported,
    kind_of,
    main,
    module_of,
    number_of,
    place_of,
    receive,
    send,
)

SCHEMAS = str(Path(sysconfig.get_path("purelib")) / "transformers")
OURS = (*OUR_FILES, str(Path(__file__).parent), str(Path(asyncio.__file__).parent), SCHEMAS)
"""Files of a traceback that are not the user's."""


class WrongAnswerError(Exception):
    """An environment gave what it must not; the text goes on after its name."""


def serve(channel: socket.socket, entrypoints: str) -> None:
    """Import the modules, say so, and begin and end episodes until the trainer hangs up.

    Commands are {"begin": number, "seed": of random numbers, "arguments": of the class}, with the episode's socket, and
    {"end": number}, which is answered by {"code": exit code of the episode's process}.
    """
    problem, found = "", []
    for each in entrypoints.split(","):
        try:
            found.append(imported(each))
        except BaseException as error:  # noqa: BLE001 whatever the user's module does
            problem = problem or f"{each} cannot be imported: {described(error, module_of(each), OURS)}"
    send(channel, {"problem": problem})
    episodes: dict[int, int] = {}
    with suppress(EOFError):
        while True:
            command = receive(channel)
            if "end" in command:
                send(channel, {"code": _end(episodes.pop(command["end"]))})
            else:
                episodes[command["begin"]] = _begin(channel, found[0], command)


def _begin(channel: socket.socket, make: Callable[..., Any], command: Mapping[str, Any]) -> int:
    """Fork an episode's process, in a group of its own, on the socket that comes after the command."""
    _, (handle,), *_ = socket.recv_fds(channel, 1, 1)
    with socket.socket(fileno=handle) as theirs:
        process = os.fork()
        if process == 0:
            channel.close()
            end_with_parent()
            _seed(command["seed"])
            _play(theirs, make, command["arguments"])
    with suppress(OSError):  # the child does it too, whichever is first
        os.setpgid(process, process)
    return process


def _seed(seed: int) -> None:
    """Seed what a fork would continue alike in every episode."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _end(process: int) -> int:
    """Kill an episode's process and those of its group; its exit code, if it had ended before."""
    with suppress(OSError):
        os.killpg(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _play(channel: socket.socket, make: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Answer the calls of an episode, {method: argument}, by {"answer": ...} or {"problem": ...}; never returns."""
    with suppress(OSError):
        os.setpgid(0, 0)
    code = 1
    try:
        with suppress(EOFError, OSError):
            _answer_all(channel, Episode(make, arguments))
        code = 0
    finally:  # else this process would go on as the one that has forked it
        os._exit(code)


def _answer_all(channel: socket.socket, episode: Episode) -> None:
    mine = os.getpid()
    while True:
        answer = episode.answer(receive(channel))
        if os.getpid() != mine:  # the environment forked and returned in both processes
            return
        send(channel, answer)


class Episode:
    """An object of the user's class, made with the first call; its methods may be coroutines."""

    def __init__(self, make: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._make, self._arguments = make, arguments
        self._environment: Any = None
        self._loop: Any = None

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """What the environment says to {method: argument}, or its problem."""
        ((method, given),) = call.items()
        called, function = "__init__", self._make
        try:
            if self._environment is None:
                self._environment = self._make(**self._arguments)
            called, function = method, getattr(type(self._environment), method, self._make)
            found = self._awaited(getattr(self._environment, method)(given))
            return {"answer": ANSWERS[method](found)}
        except WrongAnswerError as error:
            return {"problem": f"{method} gave {error}{place_of(function)}"}
        except BaseException as error:  # noqa: BLE001 SystemExit as well: whatever the user's code raises
            return {"problem": f"{called} raised {described(error, function, OURS)}"}

    def _awaited(self, found: Any) -> Any:
        if not inspect.isawaitable(found):
            return found
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(found)


def _step(found: Any) -> tuple[Any, float, bool]:
    """(observation, reward, whether the episode is over)."""
    if not isinstance(found, tuple | list) or len(found) != 3:
        raise WrongAnswerError(f"{kind_of(found)}, expected (observation, reward, done)")
    observation, reward, done = found
    try:
        number = number_of(reward)
    except ValueError as error:
        raise WrongAnswerError(f"as reward {error}") from None
    if number is None:
        raise WrongAnswerError("as reward None, expected a number")
    if not done and observation is None:
        raise WrongAnswerError("no observation, but the episode is not done")
    return (None if done else _messages(observation)), number, bool(done)


def _messages(found: Any) -> Any:
    """A text, messages with their role and content, or None."""
    are_messages = isinstance(found, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in found
    )
    if not (found is None or (isinstance(found, str) and found) or (are_messages and found)):
        raise WrongAnswerError(f"{kind_of(found)}, expected a text, or messages of role and content, both texts")
    json.dumps(found)
    return found


ANSWERS: Mapping[str, Callable[[Any], Any]] = {"reset": _messages, "step": _step, "schemas": lambda found: found}
"""What each method may give, as JSON."""


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], serve)
