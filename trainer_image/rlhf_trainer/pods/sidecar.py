"""The side-car of a Ray head: shows the trainer's log, and serves the trainer's status to the operator.

`python -m rlhf_trainer.pods.sidecar JOB_FOLDER` copies the newest log of a Ray job's driver, from its beginning, to
stdout and to a file of the run folder, which stays when the pod is gone. It also serves /status.json and /healthz. It
uses the standard library only and runs in 64 MiB. After SIGTERM it stays until the trainer has saved its checkpoint.
"""

import argparse
import json
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO

from rlhf_trainer.pods.ray_logs import LOGS
from rlhf_trainer.run_folder.attempt import AttemptId, Watch, WrongAttempt, own_attempt, read_exit, read_status

PORT = 8490
POLL_SECONDS = 0.5
CHUNK = 1 << 16
KEPT_LOGS = 10
MAX_LOG_BYTES = 64 << 20
"""Maximum bytes of a driver log that are kept in the run folder; the volume is for checkpoints."""


def answer(job_folder: Path, attempt: AttemptId) -> dict[str, Any]:
    """Return the content of /status.json: the status of this attempt and, after its trainer's end, the exit code."""
    ended = read_exit(job_folder.parent, attempt)  # read first: the status that is read after it is final
    status = read_status(job_folder, attempt)
    code = ended["exitCode"] if ended else None
    if ended and code and "lastFailure" not in status:  # it failed before the job began
        failure = {name: ended[name] for name in ("reason", "exitCode", "message", "attempt") if name in ended}
        phase = "Stopped" if code > 128 else "Failed"  # 128 + a signal's number
        status = {**status, "phase": phase, "attempt": attempt.number, "lastFailure": failure}
    identity = {"attempt": attempt.number, "jobUid": attempt.job_uid}
    return {**identity, "status": status, "complete": ended is not None, "exitCode": code}


class Server(ThreadingHTTPServer):
    """HTTP server of the side-car, on all addresses of the pod, with IPv6 if the pod has it."""

    daemon_threads = True

    def __init__(self, job_folder: Path, attempt: AttemptId, port: int) -> None:
        self.job_folder, self.attempt = job_folder, attempt
        if socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__(("", port), Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a request, such as a client that closed its connection."""


class Handler(BaseHTTPRequestHandler):
    """Handler of one HTTP request: GET /status.json or /healthz."""

    server: Server
    timeout = 10

    def do_GET(self) -> None:
        if self.path == "/status.json":
            self._send(200, "application/json", json.dumps(answer(self.server.job_folder, self.server.attempt)))
        elif self.path == "/healthz":
            self._send(200, "text/plain", "ok")
        else:
            self._send(404, "text/plain", "only /status.json and /healthz are here")

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Write no line about an HTTP request, because stdout and stderr show the trainer's log."""


class LogFollower:
    """Copier of the newest log of a Ray job's driver: it follows the log as it grows, and moves on to a newer log."""

    def __init__(self, folder: Path, shown: BinaryIO, kept: BinaryIO | None) -> None:
        self._folder, self._shown, self._kept = folder, shown, kept
        self._room = MAX_LOG_BYTES
        self._file: BinaryIO | None = None
        self._path: Path | None = None

    def copy(self) -> None:
        """Copy the bytes that the log has gained since the last call; if it cannot be read, a later call does so."""
        with suppress(OSError):
            self._copy_rest()
            found = [(file.stat().st_mtime, file.resolve()) for file in self._folder.glob("job-driver-*.log")]
            newest = max(found)[1] if found else self._path
            if newest and newest != self._path:
                if self._file:
                    self._file.close()
                self._file, self._path = newest.open("rb"), newest
                self._copy_rest()

    def _copy_rest(self) -> None:
        while self._file and (chunk := self._file.read(CHUNK)):
            self._shown.write(chunk)
            self._shown.flush()
            with suppress(OSError):  # a full disk
                if self._kept and self._room > 0:
                    self._kept.write(chunk[: self._room])
            self._room -= len(chunk)


def kept_log(output: Path, attempt: AttemptId) -> BinaryIO | None:
    """Open a new file in the run folder for the driver log of an attempt, and delete the oldest; None if that fails."""
    with suppress(OSError):
        new = output / f"driver-a{attempt.number}.log"
        new.unlink(missing_ok=True)  # not truncated: a pod of another RLHFJob may still write to it
        older = sorted(output.glob("driver-a*.log"), key=lambda file: file.stat().st_mtime)
        for file in older[: -KEPT_LOGS + 1]:
            file.unlink(missing_ok=True)
        return new.open("xb", buffering=0)
    return None


def serve(job_folder: Path, attempt: AttemptId, *, port: int, logs: Path, stay: float) -> None:
    """Serve the status and copy the log until a signal came and the trainer ended, or `stay` seconds after the signal.

    OSError if the port cannot be opened.
    """
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server = Server(job_folder, attempt, port)
    Thread(target=partial(server.serve_forever, poll_interval=POLL_SECONDS), daemon=True).start()
    follower = LogFollower(logs, sys.stdout.buffer, kept_log(job_folder.parent, attempt))
    while not stop.wait(POLL_SECONDS):
        follower.copy()
    watch, until = Watch(job_folder.parent, attempt), time.monotonic() + stay
    while watch.is_alive() and time.monotonic() < until:
        follower.copy()
        time.sleep(POLL_SECONDS)
    follower.copy()


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: read the command line, and serve and copy until the trainer has ended."""
    parser = argparse.ArgumentParser("python -m rlhf_trainer.pods.sidecar")
    parser.add_argument("job_folder", type=Path, metavar="JOB_FOLDER", help="the job's folder in the run folder")
    parser.add_argument("--port", type=int, default=PORT, help=f"port of /status.json; default {PORT}")
    parser.add_argument("--logs", type=Path, default=LOGS, help=f"folder of Ray's logs; default {LOGS}")
    parser.add_argument("--stay", type=float, default=600.0, help="seconds to wait for the trainer's end")
    given = parser.parse_args(arguments)
    try:
        attempt = own_attempt()
        if attempt is None:
            parser.exit(2, "error: RLHF_ATTEMPT is not set: this runs in the head pod of a job only\n")
        serve(given.job_folder, attempt, port=given.port, logs=given.logs, stay=given.stay)
    except WrongAttempt as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    except OSError as error:
        parser.exit(4, f"error: --port {given.port}: cannot be had: {error.strerror}\n")


if __name__ == "__main__":
    main()
