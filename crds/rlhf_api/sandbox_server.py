"""Program of a sandbox: runs one command, for the first trainer that sends a request, and ends with the command.

It needs Python alone: `python3 -I server.py FOLDER PORT SECONDS IDLE_SECONDS`. A request is {"command": words, "files":
{path below FOLDER: text}, "seconds": time limit, "attached": bool}. The answer {"taken": true} comes first. An attached
command has the connection as its standard input and output. At the end of the command comes {"code": exit code,
"output": last part of its output (attached: of its standard error), "late": whether the time limit ended it}.
A message is JSON after its length in bytes (4, big-endian). The sandbox ends, with all processes in it, as soon as the
command has ended, the trainer hangs up, or SECONDS are over.
"""

import ctypes
import json
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_OUTPUT = 2**16
"""Most bytes of a command's output in an answer; of a longer output the answer has the end."""
REQUEST_SECONDS = 10.0
"""Seconds in which a new connection must send its request."""
SHORTEST_SECONDS = 0.001
"""Shortest time limit in seconds of a read."""
PR_SET_DUMPABLE = 4


def send(channel: socket.socket, value: Any) -> None:
    """Write a JSON value to a socket; OSError if the other end is gone or (TimeoutError) does not read."""
    body = json.dumps(value).encode()
    channel.sendall(len(body).to_bytes(4, "big") + body)


def receive(channel: socket.socket, *, most: int = 2**32, until: float | None = None) -> Any:
    """Return the next JSON value of a socket; most: its largest size in bytes; until: deadline by time.monotonic().

    EOFError if the other end is gone, TimeoutError after the deadline, ValueError for a larger value or no JSON.
    """
    if (size := int.from_bytes(_read(channel, 4, until), "big")) > most:
        raise ValueError(f"it has {size} bytes, more than {most}")
    return json.loads(_read(channel, size, until))


def _read(channel: socket.socket, count: int, until: float | None) -> bytes:
    body = bytearray()
    while len(body) < count:
        if until is not None:
            channel.settimeout(max(until - time.monotonic(), SHORTEST_SECONDS))
        part = channel.recv(count - len(body))
        if not part:
            raise EOFError
        body += part
    return bytes(body)


def serve(folder: Path, port: int, seconds: float, idle_seconds: float) -> None:
    """Run the first request's command in `folder`, then end the process; return if `idle_seconds` bring no request.

    Later connections are refused. The port stays bound, or the command could answer requests for other sandboxes.
    """
    hide_memory()
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    listener = socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
    if (taken := _first_request(listener, idle_seconds)) is None:
        return
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    listener.shutdown(socket.SHUT_RDWR)
    channel, request = taken
    threading.Timer(seconds, os._exit, (0,)).start()
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    room = os.statvfs(folder)
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, room.f_blocks * room.f_frsize)):
        resource.setrlimit(limit, (value, value))  # the log and the termination message lie on the node's disk
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    with suppress(OSError):
        send(channel, {"taken": True})
        send(channel, _run(request, folder, channel))
    os._exit(0)  # no return: it would close the port before the process ends


def hide_memory() -> None:
    """Have the kernel refuse this process's memory and files to other processes of its user."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def _first_request(listener: socket.socket, seconds: float) -> tuple[socket.socket, Mapping[str, Any]] | None:
    """Return the first connection that brings a request, and the request; None if there is none in time."""
    listener.settimeout(seconds)
    with suppress(TimeoutError):
        while True:
            channel, _ = listener.accept()
            with suppress(OSError, EOFError, ValueError):
                request = receive(channel, until=time.monotonic() + REQUEST_SECONDS)
                channel.settimeout(None)
                return channel, request
            channel.close()
    return None


def _end_with(channel: socket.socket) -> None:
    """End this process, and so the sandbox, when the trainer hangs up."""
    hang_up = select.poll()
    hang_up.register(channel, select.POLLRDHUP)
    hang_up.poll()
    os._exit(0)


def _run(request: Mapping[str, Any], folder: Path, channel: socket.socket) -> dict[str, Any]:
    """Write the request's files, run its command, and return the answer; the module's docstring describes both."""
    for path, text in request["files"].items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
    attached, late = request["attached"], False
    with tempfile.TemporaryFile(dir=folder) as output:  # not a pipe, which another process may hold open
        try:
            program = subprocess.Popen(
                request["command"],
                cwd=folder,
                env={**os.environ, "HOME": str(folder)},
                stdin=channel.fileno() if attached else subprocess.DEVNULL,
                stdout=channel.fileno() if attached else output.fileno(),
                stderr=output.fileno(),
                start_new_session=True,
            )
        except OSError as error:
            return {"code": 127, "output": str(error), "late": False}
        try:
            program.wait(request["seconds"])
        except subprocess.TimeoutExpired:
            program.kill()
            late = True
        code, size = program.wait(), os.fstat(output.fileno()).st_size
        text = os.pread(output.fileno(), MAX_OUTPUT, max(size - MAX_OUTPUT, 0)).decode(errors="replace")
    return {"code": code, "output": text, "late": late}


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
