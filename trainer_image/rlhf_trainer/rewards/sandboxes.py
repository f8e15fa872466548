"""Sandboxes of a job on a cluster: pods that each run one command for the trainer, and are then replaced.

The operator makes them, and gives their address in RLHF_SANDBOXES. Elsewhere there are none, and the same code runs in
guarded processes (`supervision`). The program in a pod is `rlhf_api.sandbox_server`.
"""

import importlib.util
import os
import random
import signal
import socket
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from rlhf_api.sandbox_server import SHORTEST_SECONDS, receive, send

ADDRESS = "RLHF_SANDBOXES"
"""Environment variable with host and port of the job's sandboxes; unset where there are none."""
CONNECT_SECONDS, TAKE_SECONDS = 1.0, 10.0
"""Longest time in seconds to connect to a sandbox, and until it has taken a request."""
MAX_ANSWER = 2**20
"""Most bytes of a sandbox's answer."""
ANSWER_SECONDS = 10.0
"""Seconds that an answer may take beyond the time limit of the command."""
PAUSES, GROWTH = (0.02, 0.5), 1.5
"""Shortest and longest mean time in seconds between two attempts to find a free sandbox; one in use refuses at once."""
INSTALLED = tuple(sysconfig.get_path(each) for each in ("purelib", "platlib", "stdlib"))
"""Folders of installed packages. They are not sent; the image must have them."""


class NoSandboxError(Exception):
    """Error for a command for which no sandbox was free in time; the text is the predicate of a sentence."""


class LostSandboxError(Exception):
    """Error for a sandbox that was lost before the command ended: killed, evicted or short of memory."""


@dataclass(frozen=True)
class Finished:
    """End of a command in a sandbox."""

    code: int
    """Exit code of the command; negative: the signal that ended it."""
    output: str
    """End of what the command printed to standard output and error, at most `sandbox_server.MAX_OUTPUT` bytes."""
    late: bool
    """Whether the time limit ended the command."""


@dataclass(frozen=True)
class Sandboxes:
    """The sandboxes of a job."""

    host: str
    port: int
    warm: int
    """Number of commands that may run at a time: the job's pods, idle or working, divided by the sharing ranks."""
    seconds: float
    """Longest time of a command in its pod."""

    @classmethod
    def of(cls, spec: Any, *, sharers: int) -> Self | None:
        """Return the sandboxes of a job whose `spec.sandbox` is `spec`; None if there are no pods for sandboxes.

        sharers: number of ranks or engines that use them at the same time.
        """
        host, _, port = os.environ.get(ADDRESS, "").rpartition(":")
        return cls(host, int(port), max(1, spec.warm // sharers), float(spec.seconds)) if spec and host else None

    def run(self, command: Sequence[str], *, files: Mapping[str, str], seconds: float, until: float) -> Finished:
        """Run a command in an unused sandbox, and return how it ended.

        files: texts by path below the command's working folder, which is its HOME. seconds: time limit of the command.
        until: time of the monotonic clock by which a sandbox must be free, else NoSandboxError; the command is killed
        if it still runs then. LostSandboxError if the pod is lost; the command may have begun.
        """
        request = {"command": [*command], "files": files, "seconds": seconds, "attached": False}
        with self.open(request, until=until) as channel:
            limit = time.monotonic() + min(seconds, self.seconds) + ANSWER_SECONDS
            try:
                return Finished(**receive(channel, most=MAX_ANSWER, until=min(limit, until)))
            except (OSError, EOFError, ValueError, TypeError) as error:
                if isinstance(error, TimeoutError) and until < limit:
                    return Finished(code=-signal.SIGKILL, output="", late=True)  # the command dies with the connection
                raise LostSandboxError("lost its sandbox") from error

    def open(
        self, request: Mapping[str, Any], *, until: float, is_over: Callable[[], bool] = lambda: False
    ) -> socket.socket:
        """Return the connection to a free sandbox that has taken a request; NoSandboxError if none has by `until`.

        is_over: function that returns True when the sandbox is not needed, which ends the search.
        """
        began, pause = time.monotonic(), PAUSES[0]
        while time.monotonic() < until and not is_over():
            with suppress(OSError, EOFError, ValueError):  # the sandbox is in use, has served, or does not run yet
                channel = socket.create_connection(_resolved(self.host, self.port), timeout=CONNECT_SECONDS)
                try:
                    left = min(TAKE_SECONDS, max(until - time.monotonic(), SHORTEST_SECONDS))
                    channel.settimeout(left)
                    send(channel, request)
                    receive(channel, most=MAX_ANSWER, until=time.monotonic() + left)
                except BaseException:
                    channel.close()
                    raise
                return channel
            time.sleep(random.uniform(0.0, 2 * pause))
            pause = min(pause * GROWTH, PAUSES[1])
        raise NoSandboxError(f"found no free sandbox within {max(until - began, 0.0):.0f} s")


@lru_cache
def _resolved(host: str, port: int) -> tuple[str, int]:
    """Return the address of a Service, which stays as it is; OSError before the Service is there."""
    address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    return str(address[0]), port


def sources(modules: Iterable[str]) -> dict[str, str]:
    """Return path -> text of our own modules as files of a command, with an empty __init__.py for each package.

    The modules are found without being imported, as this image may lack their imports.
    """
    found: dict[str, str] = {}
    for name in modules:
        spec, path = importlib.util.find_spec(name), Path(name.replace(".", "/"))
        found |= {f"{package}/__init__.py": "" for package in path.parents if package.name}
        found[f"{path}.py"] = Path(str(spec and spec.origin)).read_text()
    return found


def users_sources(entrypoint: str) -> dict[str, str]:
    """Return the Python files of the user's module or package of an entry point; none if it is installed."""
    package = entrypoint.partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is None or __name__.startswith(f"{package}."):
        return {}
    if spec.submodule_search_locations is None:
        files = {Path(spec.origin): Path(spec.origin).parent} if spec.has_location and spec.origin else {}
    else:  # a package; without an __init__.py it may have several folders
        folders = (Path(each) for each in spec.submodule_search_locations if not each.startswith(INSTALLED))
        files = {file: folder.parent for folder in folders for file in folder.rglob("*.py")}
    theirs = {file: root for file, root in files.items() if not str(file).startswith(INSTALLED)}
    return {str(file.relative_to(root)): file.read_text() for file, root in theirs.items()}
