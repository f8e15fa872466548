"""The episodes of a rank as the trainer sees them: they answer in any order, each under a time limit."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.rewards.function import GUARD_SECONDS, IMPORT_SECONDS, Failure, FunctionProcess, how_ended
from rlhf_trainer.rewards.guard import receive, send

SERVER = "rlhf_trainer.environments.server"
POLL_SECONDS = 0.001
"""The shortest time in which a late episode is looked for."""


@dataclass
class Asked:
    """An episode that is under way."""

    channel: socket.socket
    until: float | None = None
    """When its answer is late; None: nothing is asked."""


class Environments:
    """Episodes of `module:Class`; its process starts at once and imports the module while the trainer goes on."""

    def __init__(self, entrypoints: Sequence[str], *, arguments: Mapping[str, Any], seconds: float, path: str) -> None:
        """entrypoints: of the class, and of what its module needs besides; seconds: the longest time of an answer.

        path: the field of the manifest, for messages.
        """
        self._entrypoints, self._arguments = ",".join(entrypoints), dict(arguments)
        self._seconds, self._path = seconds, path
        self._process: FunctionProcess | None = FunctionProcess(self._entrypoints, program=SERVER)
        self._is_imported = False
        self._selector = selectors.DefaultSelector()
        self._episodes: dict[int, Asked] = {}
        self._failed: list[tuple[int, Failure]] = []
        """Episodes that could not be asked."""

    def ready(self) -> None:
        """Wait until the modules are imported; UserCodeError if they cannot be."""
        if problem := self._import():
            raise UserCodeError(f"{self._path}: {problem}")

    def begin(self, number: int, seed: int) -> None:
        """Start an episode's process, under a number that no other has now; seed: of its random numbers."""
        problem, (ours, theirs) = self._import(), socket.socketpair()
        with theirs:
            try:
                if self._process:
                    self._process.hand({"begin": number, "seed": seed, "arguments": self._arguments}, theirs)
            except OSError:
                problem = self._ended()
        if problem:
            ours.close()
            self._failed.append((number, Failure(problem)))
            return
        self._episodes[number] = Asked(ours)

    def ask(self, number: int, method: str, given: Any) -> None:
        """Call a method of an episode; its answer comes by `answers`."""
        if number not in self._episodes:
            return  # it has failed, and `answers` says so
        episode = self._episodes[number]
        episode.until = time.monotonic() + self._seconds
        try:
            episode.channel.settimeout(self._seconds)
            send(episode.channel, {method: given})
            self._selector.register(episode.channel, selectors.EVENT_READ, number)
        except OSError:
            self._failed.append((number, self._failure_of(number)))

    def answers(self, *, seconds: float) -> list[tuple[int, Any]]:
        """(number, its answer or a Failure) of each episode that has answered, failed, or is late.

        seconds: how long to wait until there is one, if something is asked.
        """
        found: list[tuple[int, Any]] = []
        found, self._failed = [*self._failed], []
        late = [each.until for each in self._episodes.values() if each.until is not None]
        longest = max(POLL_SECONDS, min(late) - time.monotonic()) if late and not found else 0
        for key, _ in self._selector.select(min(seconds, longest)):
            found.append((key.data, self._read(key.data)))
        now = time.monotonic()
        for number in [number for number, each in self._episodes.items() if each.until and each.until <= now]:
            found.append((number, self._late()))
            self._settle(self._episodes[number])
        return found

    def end(self, number: int) -> str:
        """End an episode's process and what it has started; how it ended, if it had before."""
        if (episode := self._episodes.pop(number, None)) is None:
            return ""
        self._settle(episode)
        episode.channel.close()
        if self._process is None:
            return ""
        try:
            return how_ended(self._process.exchange({"end": number}, seconds=GUARD_SECONDS)["code"])
        except (OSError, EOFError):
            return self._ended()

    def close(self) -> None:
        """End the process, all episodes, and all that they have started."""
        for episode in self._episodes.values():
            self._settle(episode)
            episode.channel.close()
        self._episodes.clear()
        self._close_process()

    def _close_process(self) -> None:
        if self._process:
            self._process.close()
        self._process, self._is_imported = None, False

    def _settle(self, episode: Asked) -> None:
        """Nothing is asked of it; so what its process does is seen when it is asked again."""
        episode.until = None
        if episode.channel in self._selector.get_map():
            self._selector.unregister(episode.channel)

    def _import(self) -> str:
        """What is wrong with the modules; empty once they are imported. Another process starts if there is none."""
        if self._is_imported:
            return ""
        self._process = self._process or FunctionProcess(self._entrypoints, program=SERVER)
        try:
            problem = str(self._process.exchange(None, seconds=IMPORT_SECONDS)["problem"])
        except TimeoutError:
            problem = f"{self._entrypoints} did not finish its import within {IMPORT_SECONDS:g} s"
        except (OSError, EOFError):
            problem = self._ended()
        self._is_imported = not problem
        if problem:
            self._close_process()  # episodes that are asked still fail by their sockets
        return problem

    def _read(self, number: int) -> Any:
        """An answer that has begun to come."""
        episode = self._episodes[number]
        left = (episode.until or 0.0) - time.monotonic()
        self._settle(episode)
        try:
            episode.channel.settimeout(max(left, POLL_SECONDS))
            answer = receive(episode.channel)
        except TimeoutError:
            return self._late()
        except (OSError, EOFError):
            return self._failure_of(number)
        return Failure(answer["problem"]) if "problem" in answer else answer["answer"]

    def _late(self) -> Failure:
        return Failure(f"did not answer within {self._seconds:g} s")

    def _failure_of(self, number: int) -> Failure:
        """Of an episode whose process has closed its socket."""
        return Failure(self.end(number) or "ended")

    def _ended(self) -> str:
        """How the process of all episodes ended; the next one to begin starts another."""
        assert self._process is not None
        ended = self._process.ended()
        self._close_process()
        return ended
