"""Sandboxes as processes of this machine: the program of a pod, made anew as often as it ends, behind one address."""

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf_api import sandbox_server
from rlhf_trainer.rewards.sandboxes import Sandboxes

IDLE_SECONDS = 600
SECONDS_TO_END = 10


class Pool:
    """So many sandboxes at a time. A connection goes to any of them, as to the pods of a Service."""

    def __init__(self, count: int, seconds: float) -> None:
        self.programs: list[subprocess.Popen[bytes]] = []
        """All that were started."""
        self._seconds, self._ports = seconds, [free_port() for _ in range(count)]
        self._is_over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._keep, args=(port,), daemon=True) for port in self._ports]
        self._threads.append(threading.Thread(target=self._admit, daemon=True))
        for each in self._threads:
            each.start()

    def _keep(self, port: int) -> None:
        # As in an image, the trainer's packages are not there.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
        while not self._is_over.is_set():
            folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
            words = (sandbox_server.__file__, folder, port, self._seconds, IDLE_SECONDS)
            command = [sys.executable, "-I", *map(str, words)]
            with subprocess.Popen(command, env=environment, start_new_session=True) as program:
                self.programs.append(program)
            shutil.rmtree(folder)

    def _admit(self) -> None:
        while True:
            with suppress(OSError):
                outside, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(outside,), daemon=True).start()
            if self._is_over.is_set():
                return

    def _connect(self, outside: socket.socket) -> None:
        with outside, suppress(OSError), socket.create_connection(("127.0.0.1", random.choice(self._ports))) as inside:
            back = threading.Thread(target=pump, args=(inside, outside), daemon=True)
            back.start()
            pump(outside, inside)
            back.join()

    def kill_one(self) -> None:
        """SIGKILL for the newest sandbox."""
        self.programs[-1].kill()

    def end(self) -> None:
        """End all; returns when no process is left."""
        self._is_over.set()
        self._listener.close()
        for each in self._threads[:-1]:
            while each.is_alive():
                for program in list(self.programs):
                    program.kill()
                each.join(0.1)


def pump(source: socket.socket, sink: socket.socket) -> None:
    """Pass bytes on, and then the end."""
    with suppress(OSError):
        while part := source.recv(65536):
            sink.sendall(part)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def free_port() -> int:
    """A port of the loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def pool(count: int = 1, *, seconds: float = 60.0) -> Iterator[tuple[Sandboxes, Pool]]:
    """Sandboxes for the trainer, and the pool that they are."""
    made = Pool(count, seconds)
    try:
        yield Sandboxes("127.0.0.1", made.port, count, seconds), made
    finally:
        made.end()
