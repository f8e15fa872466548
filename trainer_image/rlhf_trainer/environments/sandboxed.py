"""Episodes in sandboxes: a pod runs this module (`python3 -m`) for one episode, in place of a forked process.

Its image needs the packages that the user's module imports, and Python; our modules and the user's own are sent along.
The connection to the pod carries calls and their answers, and the TCP connections of an agent's program to its model.
"""

import itertools
import json
import os
import selectors
import socket
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlhf_api.sandbox_server import receive, send
from rlhf_trainer.environments.environments import MAX_BYTES, TAKEN, play_episode
from rlhf_trainer.rewards.function import import_all
from rlhf_trainer.rewards.sandboxes import NoSandboxError, Sandboxes, sources, users_sources

MODULES = (
    *(f"rlhf_api.{name}" for name in ("exit_codes", "own_code", "sandbox_server")),
    "rlhf_trainer.agents.programs",
    *(f"rlhf_trainer.environments.{name}" for name in ("environments", "sandboxed", "tools")),
    *(f"rlhf_trainer.environments.{name}_environments" for name in ("openenv", "verifiers")),
    "rlhf_trainer.environments.gymnasium_games",
    *(f"rlhf_trainer.rewards.{name}" for name in ("function", "sample", "sandboxes", "supervision")),
)
EPISODE = "episode.json"
PART_BYTES = 2**16
"""Most bytes of a TCP connection in one message."""
MAX_CONNECTIONS = 64
"""Most connections that an episode has open at a time; more are closed at once."""
SILENT_SECONDS = 60.0
"""Time limit in seconds to connect to the model, to get the next bytes of a message, or to send a whole message."""
BASE_URL = "OPENAI_BASE_URL"


class SandboxedEpisodes:
    """Episodes of a user's `module:Class`, each in a sandbox; see `Environments`."""

    def __init__(
        self, sandboxes: Sandboxes, entrypoints: Sequence[str], *, arguments: Mapping[str, Any], patience: float
    ) -> None:
        """arguments: of the class; patience: longest wait in seconds for a free sandbox."""
        self._sandboxes, self._patience = sandboxes, patience
        self._command = {"entrypoints": ",".join(entrypoints), "arguments": dict(arguments)}
        self._files = sources(MODULES)
        for each in entrypoints:
            self._files = {**users_sources(each), **self._files}

    def open(self, seed: int) -> tuple[socket.socket, Callable[[], None]]:
        """Return a socket that answers as the process of a new episode does, and a function that ends the episode.

        `TAKEN` comes before the first answer.
        """
        files = {**self._files, EPISODE: json.dumps({**self._command, "seed": seed})}
        words, limit = ["python3", "-m", "rlhf_trainer.environments.sandboxed"], self._sandboxes.seconds
        request = {"command": words, "files": files, "seconds": limit, "attached": True}
        episode = _Episode(self._sandboxes, request, patience=self._patience)
        return episode.socket, episode.close


class _Episode:
    """Trainer's end of an episode in a sandbox: a thread passes its calls there, and the answers back."""

    def __init__(self, sandboxes: Sandboxes, request: Mapping[str, Any], *, patience: float) -> None:
        self.socket, self._theirs = socket.socketpair()
        self._sandboxes, self._request, self._patience = sandboxes, request, patience
        self._channel: socket.socket | None = None
        self._is_over = False
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """End the episode, its sandbox and its thread, whatever the thread waits for."""
        self._is_over = True
        self.socket.close()
        if self._channel:
            with suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        """Find a sandbox for the first call, and pass on messages until the episode ends."""
        with self._theirs, suppress(OSError, EOFError):
            call = receive(self._theirs)
            until = time.monotonic() + self._patience
            try:
                self._channel = self._sandboxes.open(self._request, until=until, is_over=lambda: self._is_over)
            except NoSandboxError as error:
                send(self._theirs, {"problem": str(error), "kind": "no sandbox"})
                return
            with self._channel as channel:
                send(self._theirs, TAKEN)
                channel.settimeout(SILENT_SECONDS)
                send(channel, call)
                url = urlsplit(call["run"]["variables"][BASE_URL]) if "run" in call else None  # of an agent's program
                model = (str(url.hostname), int(url.port or 0)) if url else None
                problem = Tunnel(channel, self._theirs, model=model).carry()
                send(self._theirs, {"problem": problem or "lost its sandbox", "kind": "raised" if problem else "lost"})


class Tunnel:
    """One end of the connection to a sandbox: carries messages of the local process, and bytes of TCP connections.

    {"connection": number} announces a new connection. {"connection": number, "bytes": base64}: data of a connection;
    empty bytes close it.
    """

    def __init__(
        self,
        channel: socket.socket,
        process: socket.socket,
        *,
        model: tuple[str, int] | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """channel: to the other end; model: the model's address (trainer's end); listener: for programs (sandbox)."""
        self._channel, self._process, self._model, self._listener = channel, process, model, listener
        self._connections: dict[int, socket.socket] = {}
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        for each in filter(None, (channel, process, listener)):
            self._selector.register(each, selectors.EVENT_READ)

    def carry(self) -> str:
        """Carry messages until the other end or the process is gone; returns what is wrong with a message, or ''."""
        try:
            while True:
                for key, _ in self._selector.select():
                    self._take(key)
        except (OSError, EOFError):
            return ""
        except Exception as error:  # noqa: BLE001 whatever the other end, where code of a model runs, has sent
            return f"sent what is no message: {error}"
        finally:
            for each in self._connections.values():
                each.close()
            self._selector.close()

    def _take(self, key: selectors.SelectorKey) -> None:
        """Pass on what a socket has; OSError or EOFError if the other end or the process is gone."""
        if key.fileobj is self._process:
            send(self._channel, receive(self._process))
        elif self._listener and key.fileobj is self._listener:
            connection, _ = self._listener.accept()
            send(self._channel, {"connection": self._add(next(self._numbers), connection)})
        elif key.fileobj is not self._channel:
            self._read(key.data)
        elif "connection" not in (message := receive(self._channel, most=MAX_BYTES)):
            send(self._process, message)
        elif "bytes" in message:
            self._write(message["connection"], b64decode(message["bytes"]))
        else:
            self._connect(message["connection"])

    def _add(self, number: int, connection: socket.socket) -> int:
        self._connections[number] = connection
        self._selector.register(connection, selectors.EVENT_READ, number)
        return number

    def _connect(self, number: int) -> None:
        """Connect to the model for a new connection at the other end, or have it closed there."""
        with suppress(OSError):
            if self._model and number not in self._connections and len(self._connections) < MAX_CONNECTIONS:
                self._add(number, socket.create_connection(self._model, timeout=SILENT_SECONDS))
                return
        send(self._channel, {"connection": number, "bytes": ""})

    def _read(self, number: int) -> None:
        part = b""
        with suppress(OSError):
            part = self._connections[number].recv(PART_BYTES) if number in self._connections else b""
        if not part:
            self._close(number)
        send(self._channel, {"connection": number, "bytes": b64encode(part).decode()})

    def _write(self, number: int, part: bytes) -> None:
        with suppress(OSError):  # that connection is gone: its end is read next
            if part and number in self._connections:
                self._connections[number].sendall(part)
        if not part:
            self._close(number)

    def _close(self, number: int) -> None:
        if connection := self._connections.pop(number, None):
            self._selector.unregister(connection)
            connection.close()


def main() -> None:
    """Serve an episode in a sandbox; the connection to the trainer is the standard input and output."""
    channel = socket.socket(fileno=os.dup(0))
    for number in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    command = json.loads(Path(EPISODE).read_text())
    (made, *_), problem = import_all(command["entrypoints"])
    call = receive(channel)
    if problem:
        send(channel, {"problem": problem})
        return
    listener = None
    if "run" in call:
        listener = socket.create_server(("127.0.0.1", 0))
        call["run"]["variables"][BASE_URL] = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    ours, theirs = socket.socketpair()
    send(ours, call)
    threading.Thread(target=_carry, args=(Tunnel(channel, ours, listener=listener),), daemon=True).start()
    play_episode(theirs, made, command)


def _carry(tunnel: Tunnel) -> None:
    """Carry messages, and end the episode when the trainer is gone."""
    tunnel.carry()
    os._exit(0)


if __name__ == "__main__":
    main()
