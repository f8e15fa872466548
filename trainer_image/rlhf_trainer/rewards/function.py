"""A user's function, called in a process of its own under a time limit; any failure becomes one sentence."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.rewards.guard import receive, send
from rlhf_trainer.rewards.sample import Sample, Score

IMPORT_SECONDS = 300.0
"""How long the function's module may take to be imported."""
GUARD_SECONDS = 10.0
"""How long the guard may take to kill what the function has started."""
SEARCH_LIMITS = 3
"""The search for the offending sample may take so many time limits."""
SIGNALS = {int(each): f" ({each.name})" for each in signal.Signals}
"""Number of a signal -> its name for messages; most real-time signals have none."""


@dataclass(frozen=True)
class Failure:
    """What a function did instead of answering, and to which of the samples, if that is known."""

    what: str
    index: int | None = None


class UserFunction:
    """`module:function`, called with (prompts, responses, whether each ended with end-of-text, **columns, **arguments).

    It returns a score for each response: a number, None, or a mapping of named parts. Its process starts at once and
    imports the module while the trainer goes on.
    """

    def __init__(
        self,
        entrypoint: str,
        *,
        arguments: Mapping[str, Any],
        seconds: float,
        deadline: float,
        path: str,
        called: str = "",
    ) -> None:
        """`path`: the function's field in the manifest, for messages; called: by another name than its entrypoint.

        seconds: the longest that a call may take; deadline: the longest that `scores` may take with its search.
        """
        self._entrypoint, self._arguments = entrypoint, dict(arguments)
        self._name = f"{path}: {called or entrypoint}"
        self._seconds, self._deadline = seconds, deadline
        self._process: FunctionProcess | None = FunctionProcess(entrypoint)
        self._is_imported = False

    def ready(self) -> None:
        """Wait until the module is imported; UserCodeError if it cannot be."""
        if failure := self._import():
            raise UserCodeError(f"{self._name} {failure.what}")

    def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """A score for each sample. UserCodeError, with the offending sample, for everything else it may do."""
        if not samples:
            return []
        until = time.monotonic() + self._deadline
        answer = self._ask(samples)
        if isinstance(answer, Failure):
            failure, which = self._find_sample(answer, samples, until=until)
            self.close()
            raise UserCodeError(f"{self._name} {failure.what}; {which}")
        return answer

    def close(self) -> None:
        """End the function's process and all that it has started."""
        if self._process:
            self._process.close()
        self._process, self._is_imported = None, False

    def _ask(self, samples: Sequence[Sample]) -> list[Score] | Failure:
        if failure := self._import():
            return failure
        call = {
            "prompts": [sample.prompt for sample in samples],
            "responses": [sample.response for sample in samples],
            "finished": [sample.finished for sample in samples],
            "columns": {name: [sample.columns[name] for sample in samples] for name in samples[0].columns},
            "arguments": self._arguments,
        }
        return self._exchange(call, seconds=self._seconds, doing="return")

    def _import(self) -> Failure | None:
        """Make sure that there is a process that has imported the function; start another if it has ended."""
        if self._is_imported:
            return None
        self._process = self._process or FunctionProcess(self._entrypoint)
        answer = self._exchange(None, seconds=IMPORT_SECONDS, doing="finish its import")
        self._is_imported = not isinstance(answer, Failure)
        return answer if isinstance(answer, Failure) else None

    def _exchange(self, call: Any, *, seconds: float, doing: str) -> list[Score] | Failure:
        """Send a call, if there is one, and wait for the answer; a process that gives none is killed."""
        assert self._process is not None
        try:
            answer = self._process.exchange(call, seconds=seconds)
        except TimeoutError:
            self.close()
            return Failure(f"did not {doing} within {seconds:g} s")
        except (OSError, EOFError):
            ended = self._process.ended()
            self.close()
            return Failure(ended)
        if problem := answer.get("problem"):
            return Failure(problem, answer.get("index"))
        return [Score(*score) for score in answer.get("scores", [])]

    def _find_sample(self, failure: Failure, samples: Sequence[Sample], *, until: float) -> tuple[Failure, str]:
        """The failure and its sample, known or found by calling the function on each sample alone, until `until`."""
        if failure.index is not None or len(samples) == 1:
            return failure, f"the sample is {samples[failure.index or 0]}"
        first = f"the first of the {len(samples)} is {samples[0]}"
        self._import()  # starting another process does not count for the search
        last_start = min(until - self._seconds, time.monotonic() + SEARCH_LIMITS * self._seconds)
        for sample in samples:
            if time.monotonic() >= last_start:
                return failure, f"there was no time to find the sample, {first}"
            if isinstance(again := self._ask([sample]), Failure):
                return again, f"the sample is {sample}"
        return failure, f"no sample does it by itself, {first}"


def how_ended(code: int) -> str:
    """How a process ended, by its exit code, for a message."""
    if code < 0:
        return f"was ended by signal {-code}{SIGNALS.get(-code, '')}"
    return f"ended its process with exit code {code}"


class FunctionProcess:
    """The process of a function, behind its guard."""

    def __init__(self, entrypoint: str, *, program: str = "rlhf_trainer.rewards.guard") -> None:
        """program: the module that guards it, and says what it serves."""
        self._channel, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "CUDA_VISIBLE_DEVICES": "",  # the trainer needs all memory of its GPUs
        }
        with theirs:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", program, str(theirs.fileno()), entrypoint],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def exchange(self, call: Any, *, seconds: float) -> dict[str, Any]:
        """Send a call, if there is one, and receive an answer, each within `seconds`; else TimeoutError.

        OSError or EOFError when the process has ended.
        """
        self._channel.settimeout(seconds)
        if call is not None:
            send(self._channel, call)
        answer: dict[str, Any] = receive(self._channel)
        return answer

    def hand(self, value: Any, theirs: socket.socket) -> None:
        """Send a value, and with it an open socket; OSError when the process has ended."""
        send(self._channel, value)
        socket.send_fds(self._channel, [b"\0"], [theirs.fileno()])

    def ended(self) -> str:
        """How the process ended, for a message."""
        try:
            return how_ended(self._guard.wait(GUARD_SECONDS))
        except subprocess.TimeoutExpired:
            return "closed its connection to the trainer"

    def close(self) -> None:
        """End the process: the guard kills it when its socket is closed."""
        self._channel.close()
        try:
            self._guard.wait(GUARD_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()
