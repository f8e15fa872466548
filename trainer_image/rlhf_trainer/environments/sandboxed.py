"""Episodes in sandboxes: a pod runs this module (`python3 -m`) for one episode, in place of a forked process.

Its image needs the packages that the user's module imports, and Python; our modules and the user's own are sent along.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_api.sandbox_server import receive, send
from rlhf_trainer.environments.environments import play_episode
from rlhf_trainer.rewards.function import import_all
from rlhf_trainer.rewards.sandboxes import NoSandboxError, Sandboxes, sources, users_sources

MODULES = (
    *(f"rlhf_api.{name}" for name in ("exit_codes", "own_code", "sandbox_server")),
    *(f"rlhf_trainer.environments.{name}" for name in ("environments", "gymnasium_games", "sandboxed", "tools")),
    *(f"rlhf_trainer.rewards.{name}" for name in ("function", "sample", "sandboxes", "supervision")),
)
"""Modules of an episode in a sandbox."""
EPISODE = "episode.json"


class SandboxedEpisodes:
    """Episodes of a user's `module:Class`, each in a sandbox; see `Environments`."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        entrypoints: Sequence[str],
        *,
        arguments: Mapping[str, Any],
        seconds: float,
        patience: float,
    ) -> None:
        """seconds: time limit of an answer; patience: longest wait in seconds for a free sandbox."""
        self._sandboxes, self._seconds, self._patience = sandboxes, seconds, patience
        self._command = {"entrypoints": ",".join(entrypoints), "arguments": dict(arguments)}
        self._files = sources(MODULES)
        for each in entrypoints:
            self._files = {**users_sources(each), **self._files}

    def begin(self, seed: int) -> socket.socket:
        """Return a socket that answers as the process of a new episode does, as soon as a sandbox is free."""
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._relay, args=(theirs, seed), daemon=True).start()
        return ours

    def _relay(self, theirs: socket.socket, seed: int) -> None:
        """Pass calls to a sandbox, and its answers back, until the trainer closes its end."""
        files = {**self._files, EPISODE: json.dumps({**self._command, "seed": seed})}
        words, limit = ["python3", "-m", "rlhf_trainer.environments.sandboxed"], self._sandboxes.seconds
        request = {"command": words, "files": files, "environment": {}, "seconds": limit, "attached": True}
        with theirs, suppress(OSError, EOFError):
            call = receive(theirs)
            try:
                channel = self._sandboxes.open(request, until=time.monotonic() + self._patience)
            except NoSandboxError as error:
                send(theirs, {"problem": str(error)})
                return
            with channel:
                while True:
                    send(theirs, self._answer(channel, call))
                    call = receive(theirs)

    def _answer(self, channel: socket.socket, call: Any) -> Any:
        try:
            channel.settimeout(self._seconds)
            send(channel, call)
            return receive(channel)
        except TimeoutError:
            return {"problem": f"did not answer within {self._seconds:g} s"}
        except (OSError, EOFError):
            return {"problem": "lost its sandbox, or ended its process there"}


def main() -> None:
    """Serve an episode in a sandbox; the connection to the trainer is the standard input and output."""
    channel = socket.socket(fileno=os.dup(0))
    for number in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    command = json.loads(Path(EPISODE).read_text())
    (made, *_), problem = import_all(command["entrypoints"])
    if problem:
        receive(channel)
        send(channel, {"problem": problem})
    else:
        play_episode(channel, made, command)


if __name__ == "__main__":
    main()
