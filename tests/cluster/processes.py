"""Programs of the cluster as child processes that end with their parent, whatever ends it."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.patience import BUSY_FACTOR, PATIENCE_SECONDS

PR_SET_PDEATHSIG = 1
TAIL = 3000
"""How much of a log is shown when its program ends, characters."""


class FailedError(RuntimeError):
    """A command or a program of the cluster ended badly, or took too long."""


def die_with_parent() -> None:
    """Even a SIGKILL of the parent leaves nothing running."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def output_of(*command: object, text: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run a command with `text` as its input: what it printed; FailedError with its complaint."""
    words = [str(word) for word in command]
    variables = {**os.environ, **environment} if environment else None
    result = subprocess.run(words, input=text, env=variables, capture_output=True, text=True, check=False)
    if result.returncode:
        raise FailedError(f"{' '.join(words)} exits with {result.returncode}\n{result.stderr.strip()}")
    return result.stdout


class Processes:
    """The running programs by name, with a log each in FOLDER/log."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder
        self.programs = programs
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, tuple[list[str], dict[str, str]]] = {}
        (folder / "log").mkdir(exist_ok=True)
        (folder / "orders").mkdir(exist_ok=True)

    def start(
        self, name: str, *arguments: str, program: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a program of the cluster, or `program` under that name."""
        command = [str(program or self.programs / name), *arguments]
        self._commands[name] = command, {**os.environ, **(environment or {})}
        self._run(name)

    def _run(self, name: str) -> None:
        command, environment = self._commands[name]
        with (self.folder / "log" / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # a Ctrl-C is for the one that stops them in order
                preexec_fn=die_with_parent,  # noqa: PLW1509 no threads here
            )

    def obey(self) -> None:
        """Do what a test asked for by a file FOLDER/orders/stop-NAME or start-NAME; the file goes when it is done."""
        for order in sorted((self.folder / "orders").iterdir()):
            verb, _, name = order.name.partition("-")
            if verb == "stop" and name in self.running:
                self._end(self.running.pop(name))
            elif verb == "start" and name not in self.running:
                self._run(name)
            order.unlink()

    def name_of(self, pid: int) -> str | None:
        """Which running program has a process number, if any."""
        return next((name for name, process in self.running.items() if process.pid == pid), None)

    def check(self) -> None:
        """FailedError with the end of its log if a program has ended by itself."""
        for name, process in self.running.items():
            if process.poll() is not None:
                tail = (self.folder / "log" / f"{name}.log").read_text(errors="replace")[-TAIL:]
                raise FailedError(f"{name} ended with {process.returncode}\n{tail}")

    def until(self, what: str, condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
        """Wait for a condition; FailedError if a program ends meanwhile or the time is over."""
        end = time.monotonic() + max(seconds, min(PATIENCE_SECONDS, BUSY_FACTOR * seconds))
        while time.monotonic() < end:
            self.check()
            if _holds(condition):
                return
            time.sleep(0.05)
        raise FailedError(f"{what} is not ready after {seconds:.0f} s")

    def stop(self) -> None:
        """End all programs at once: nothing here is worth a graceful end."""
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()


def _holds(condition: Callable[[], object]) -> bool:
    try:
        return bool(condition())
    except (OSError, FailedError):
        return False
