"""Episodes with an environment of the user's: they answer in any order, each under a time limit.

`Environments` is the trainer's end. A guarded process runs this module (`python -m`, so imports at its top are quick):
it imports the user's modules once, and forks a guarded process for each episode, with a socket of its own. So an
episode that crashes or hangs ends alone, with all that it has started, and the content of a module is in memory once.
"""

import asyncio  # imported before the forks: tens of milliseconds in each episode
import inspect
import json
import math
import os
import random
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, get_args

from rlhf_api.sandbox_server import receive, send
from rlhf_trainer.rewards import supervision
from rlhf_trainer.rewards.function import WrongAnswerError, description_of, import_all, kind_of, number_of, place_of
from rlhf_trainer.rewards.supervision import AnswerFailure

POLL_SECONDS = 0.001
"""Shortest wait in seconds for the answer of an episode that is late."""
MAX_EPISODES = 256
"""Most episodes that an engine plays at a time; each takes a process and an open socket."""
MAX_BYTES = 2**23
"""Most bytes of an episode's answer."""
MAX_PROBLEM = 1000
"""Most characters of an episode's sentence on its failure."""
TAKEN = {"begun": True}
"""Message of the trainer's thread for an episode: a sandbox has taken its request."""
TAKEN_BY_SANDBOX = object()
"""Value in place of an answer: a sandbox has taken the request."""
OpenSandbox = Callable[[int], tuple[socket.socket, Callable[[], None]]]
"""Function (seed) -> the socket that answers for a new episode in a sandbox, and a function that ends the episode."""


@dataclass
class RunningEpisode:
    """Trainer's record of an episode: the socket to its process, and the time limit of a pending request."""

    channel: socket.socket
    close: Callable[[], None]
    method: str = ""
    """Method that was called last."""
    until: float | None = None
    """Monotonic time by which the episode must answer; None: no request is pending; inf: its time is paused."""
    left: float = 0.0
    """Seconds that the episode had left for its answer when its time was paused."""
    pauses: int = 0
    waits: bool = False
    """True until a sandbox has taken its request; its time is paused until then."""


class Environments:
    """Episodes of a user's `module:Class`; a guarded process imports it at once, while the trainer goes on."""

    def __init__(
        self,
        entrypoints: Sequence[str],
        *,
        arguments: Mapping[str, Any],
        seconds: float,
        path: str,
        open_sandbox: OpenSandbox | None = None,
        most: int = MAX_EPISODES,
        has_rewards: bool = True,
    ) -> None:
        """Start the guarded process, unless there are sandboxes. path: the field of the manifest, for error messages.

        entrypoints: of the environment's class, then of functions that it calls; seconds: time limit of an answer.
        most: episodes at a time; has_rewards: whether steps may give a reward other than 0.
        """
        names = ",".join(entrypoints)
        self._arguments, self._seconds, self._path = dict(arguments), seconds, path
        self._open_sandbox, self.most, self._has_rewards = open_sandbox, most, has_rewards
        self._process: supervision.UserProcess | None = None
        if open_sandbox is None:
            program = "rlhf_trainer.environments.environments"
            self._process = supervision.UserProcess(program, names, subject=f"{names} ")
        self._selector = selectors.DefaultSelector()
        self._episodes: dict[int, RunningEpisode] = {}
        self._failed: list[tuple[int, AnswerFailure]] = []
        """Numbers of episodes that failed before their request was sent, with the failure."""

    def ready(self) -> None:
        """Wait until the guarded process has imported the user's modules; UserCodeError if it cannot."""
        if self._process and (failure := self._process.await_import()):
            from rlhf_trainer.errors import UserCodeError  # imports pydantic: seconds in the process of episodes

            raise UserCodeError(f"{self._path}: {failure.what}")

    def begin(self, number: int, seed: int) -> None:
        """Begin an episode: fork its process, or prepare the connection to a sandbox.

        number: unused so far; seed: of the process's random numbers.
        """
        if self._open_sandbox:
            self._episodes[number] = RunningEpisode(*self._open_sandbox(seed), waits=True)
            return
        assert self._process is not None, "it was started"
        ours, theirs = socket.socketpair()
        with theirs:
            failure = self._process.hand({"begin": number, "seed": seed, "arguments": self._arguments}, theirs)
        if failure:
            ours.close()
            self._failed.append((number, failure))
        else:
            self._episodes[number] = RunningEpisode(ours, ours.close)

    def ask(self, number: int, method: str, given: Any) -> None:
        """Send an episode the call of a method of its environment; `answers` returns the result."""
        if number not in self._episodes:
            return  # the episode has failed, and `answers` says so
        episode = self._episodes[number]
        episode.method, episode.until, episode.pauses = method, time.monotonic() + self._seconds, 0
        if episode.waits:
            self.pause(number)
        with suppress(OSError):  # the process has ended; a read of its socket will show this
            episode.channel.settimeout(self._seconds)
            send(episode.channel, {method: given})
        self._selector.register(episode.channel, selectors.EVENT_READ, number)

    def pause(self, number: int) -> None:
        """Stop the time of an episode's request while the trainer works for the episode, until `resume`."""
        if (episode := self._episodes.get(number)) and episode.until is not None:
            if not episode.pauses:
                episode.left, episode.until = episode.until - time.monotonic(), math.inf
            episode.pauses += 1

    def resume(self, number: int) -> None:
        """Let the time of an episode's request go on, if it is not paused for another reason."""
        if (episode := self._episodes.get(number)) and episode.until is not None:
            episode.pauses -= 1
            if not episode.pauses:
                episode.until = time.monotonic() + episode.left

    def answers(self, *, seconds: float) -> list[tuple[int, Any]]:
        """Return (number, answer or AnswerFailure) of each episode that has answered, failed, or is late.

        seconds: longest wait for the first such episode, if a request is pending; else there is no wait.
        """
        found: list[tuple[int, Any]] = [*self._failed]
        self._failed = []
        limits = [each.until for each in self._episodes.values() if each.until is not None]
        longest = max(POLL_SECONDS, min(limits) - time.monotonic()) if limits and not found else 0
        for key, _ in self._selector.select(min(seconds, longest)):
            if (answer := self._read(key.data)) is not TAKEN_BY_SANDBOX:
                found.append((key.data, answer))
        now = time.monotonic()
        for number in [number for number, each in self._episodes.items() if each.until and each.until <= now]:
            found.append((number, self._lateness()))
            self._drop_request(self._episodes[number])
        return found

    def end(self, number: int) -> str:
        """End an episode's process and its descendants; returns how the process ended, empty if unknown.

        The closed socket tells the episode's guard to kill them.
        """
        if (episode := self._episodes.pop(number, None)) is None:
            return ""
        self._drop_request(episode)
        episode.close()
        if self._process is None or not self._process.is_running:
            return ""
        answer = self._process.call({"end": number}, seconds=supervision.GUARD_SECONDS)
        return answer.what if isinstance(answer, AnswerFailure) else supervision.ending_of(answer["code"])

    def close(self) -> None:
        """End the guarded process, the processes of all episodes, and all their descendants."""
        for episode in self._episodes.values():
            self._drop_request(episode)
            episode.close()
        self._episodes.clear()
        if self._process:
            self._process.close()

    def _drop_request(self, episode: RunningEpisode) -> None:
        """Stop waiting for this episode. A crash of its process shows at the next request."""
        episode.until = None
        if episode.channel in self._selector.get_map():
            self._selector.unregister(episode.channel)

    def _read(self, number: int) -> Any:
        """Return the answer of an episode whose socket has something to read, an AnswerFailure, or TAKEN_BY_SANDBOX."""
        episode, longest = self._episodes[number], time.monotonic() + self._seconds
        try:
            message = receive(episode.channel, most=MAX_BYTES, until=min(episode.until or 0.0, longest))
        except (OSError, EOFError) as error:
            self._drop_request(episode)
            if isinstance(error, TimeoutError):
                return self._lateness()
            return AnswerFailure(self.end(number) or "ended", kind="ended" if self._process else "lost")
        except (ValueError, RecursionError) as error:
            self._drop_request(episode)
            return AnswerFailure(f"sent what is no answer: {error}")
        if episode.waits and message == TAKEN:
            episode.waits = False
            self.resume(number)
            return TAKEN_BY_SANDBOX
        self._drop_request(episode)
        answer = answer_in(message, episode.method)
        if episode.method == "step" and not self._has_rewards and isinstance(answer, list) and answer[1]:
            return AnswerFailure(f"step gave as reward {answer[1]}, but tools give none")
        return answer

    def _lateness(self) -> AnswerFailure:
        return AnswerFailure(f"did not answer within {self._seconds:g} s", kind="late")


def answer_in(message: Any, method: str) -> Any:
    """Return the answer to a call of `method`, or the failure, in a message that code of the model may have written."""
    failure = AnswerFailure("sent what is no answer")
    try:
        match message:
            case {"answer": answer}:
                return ANSWERS[method](answer)
            case {"problem": str(problem)} if problem:
                kind = message.get("kind")
                failure = AnswerFailure(problem, kind=kind if kind in get_args(supervision.Kind) else "raised")
            case {"code": int(code), "output": str(output)}:
                last = output.strip().rpartition("\n")[2]
                failure = AnswerFailure(f"{supervision.ending_of(code)}{': ' * bool(last)}{last}", kind="ended")
    except (WrongAnswerError, RecursionError) as error:
        failure = AnswerFailure(f"{method} gave {error}")
    what = failure.what[:MAX_PROBLEM].encode(errors="backslashreplace").decode()  # it is written to logs
    return replace(failure, what=what)


def serve(channel: socket.socket, entrypoints: str) -> None:
    """Import the modules, report a failure, and begin and end episodes until the trainer hangs up.

    Commands are {"begin": number, "seed": of random numbers, "arguments": of the class}, with the episode's socket, and
    {"end": number}. The answer to the latter is {"code": exit code of the episode's process}.
    """
    import rlhf_api.own_code  # noqa: F401 sentences on failures need it; a fork has it already

    found, problem = import_all(entrypoints)
    send(channel, {"problem": problem})
    episodes: dict[int, int] = {}
    with suppress(EOFError):
        while True:
            command = receive(channel)
            if "end" in command:
                process = episodes.pop(command["end"])
                send(channel, {"code": os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])})
            else:
                episodes[command["begin"]] = _begin(channel, found[0], command)


def _begin(channel: socket.socket, make: Callable[..., Any], command: Mapping[str, Any]) -> int:
    """Fork an episode's guard, which forks its process, and give it the socket sent after the command."""
    _, (handle,), *_ = socket.recv_fds(channel, 1, 1)
    with socket.socket(fileno=handle) as theirs:
        process = os.fork()
        if process == 0:
            try:
                channel.close()
                supervision.end_with_parent()
                supervision.run_guarded(lambda: play_episode(theirs, make, command), theirs)
            finally:  # otherwise this process would continue as a copy of its parent
                os._exit(1)
    return process


def play_episode(channel: socket.socket, make: Callable[..., Any], command: Mapping[str, Any]) -> None:
    """Answer the calls of an episode, {method: argument}, by {"answer": ...} or {"problem": ...}; never returns.

    command: {"seed": of random numbers, "arguments": of the class}.
    """
    with suppress(OSError):
        os.setpgid(0, 0)
    code, mine = 1, os.getpid()
    random.seed(command["seed"])  # else forks draw unseeded numbers, or all the same ones
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(command["seed"] % 2**32)
    try:
        episode = EpisodeServer(make, command["arguments"])
        with suppress(EOFError, OSError):
            answer = episode.answer(receive(channel))
            while os.getpid() == mine:  # else the environment forked and returned in both processes
                send(channel, answer)
                answer = episode.answer(receive(channel))
        code = 0
    finally:  # otherwise this process would continue as a copy of its parent
        os._exit(code)


class EpisodeServer:
    """Server of one episode: calls an object of the user's class, made at the first call; methods may be coroutines."""

    def __init__(self, make: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._make, self._arguments = make, arguments
        self._environment: Any = None
        self._loop: Any = None

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Call {method: argument} of the environment; returns {"answer": result} or {"problem": sentence}."""
        ((method, given),) = call.items()
        called, function = "__init__", self._make
        try:
            if self._environment is None:
                self._environment = self._make(**self._arguments)
            called, function = method, getattr(type(self._environment), method, self._make)
            found = getattr(self._environment, method)(given)
            if inspect.isawaitable(found):
                self._loop = self._loop or asyncio.new_event_loop()
                found = self._loop.run_until_complete(found)
            return {"answer": ANSWERS[method](found)}
        except WrongAnswerError as error:
            return {"problem": f"{method} gave {error}{place_of(function)}", "kind": error.kind}
        except BaseException as error:  # noqa: BLE001 SystemExit as well: whatever the user's code raises
            return {"problem": f"{called} raised {description_of(error, function)}"}


def _step(found: Any) -> list[Any]:
    """Check the result of an environment's `step`; returns [observation, reward, whether the episode is over]."""
    if not isinstance(found, tuple | list) or len(found) != 3:
        raise WrongAnswerError(f"{kind_of(found)}, expected (observation, reward, done)")
    observation, reward, done = found
    if (number := _reward(reward)) is None:
        raise WrongAnswerError("as reward None, expected a number")
    if not done and observation is None:
        raise WrongAnswerError("no observation, but the episode is not done")
    return [None if done else _messages(observation), number, bool(done)]


def _reward(found: Any) -> float | None:
    """Check a reward, which is a number or None; returns it as a float or None."""
    try:
        return number_of(found)
    except ValueError as error:
        raise WrongAnswerError(f"as reward {error}") from None


def _messages(found: Any) -> Any:
    """Check an observation, which is a text, messages with role and content, or None; returns it unchanged."""
    are_messages = isinstance(found, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in found
    )
    if not (found is None or (isinstance(found, str) and found) or (are_messages and found)):
        raise WrongAnswerError(f"{kind_of(found)}, expected a text, or messages of role and content, both texts")
    json.dumps(found)
    return found


ANSWERS: Mapping[str, Callable[[Any], Any]] = {
    "reset": _messages,
    "step": _step,
    "run": lambda found: _reward(found.get("reward") if isinstance(found, Mapping) else found),
    "check": lambda found: found,
    "schemas": lambda found: found,
}
"""Method of an environment -> check that returns the method's result as JSON values; the last two are not checked.

A program's `run` may return its reward in a mapping, as `reward`. The episode's process checks a result, so that a
failure names the user's line, and the trainer checks it again, as it trusts no process.
"""


if __name__ == "__main__":
    supervision.guard(serve)
