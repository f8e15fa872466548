"""SIGINT, SIGTERM and SIGHUP: a run stops after the step it is in, with a checkpoint; a second one stops it at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rlhf_api.exit_codes import ExitCode
from rlhf_trainer.errors import Paused

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded() -> tuple[signal.Signals, ...]:
    """Return the signals that stop a run; without SIGHUP (a closed terminal) if nohup has it ignored."""
    return SIGNALS[:2] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else SIGNALS


class Stopped(BaseException):
    """Exception that ends a run after a stop signal; a BaseException, so that error handlers let it pass.

    `exit_code` is that of the signal; SIGHUP has the exit code of SIGTERM.
    """

    def __init__(self, signal_number: int, *, saved: str = "") -> None:
        """saved: phrase that says which checkpoint a later run can resume from."""
        super().__init__(f"stopped by {signal.Signals(signal_number).name}{saved and '; ' + saved}")
        self.exit_code = ExitCode.SIGINT if signal_number == signal.SIGINT else ExitCode.SIGTERM


class StopSignals:
    """Handlers of the signals that stop a run, the signal that has come, and whether the run is to pause."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` tells the user that the run will stop."""
        self.requested: int | None = None
        """Number of the stop signal that came during a step; None: no signal came."""
        self.pause = ""
        """Sentence on why the run is to pause after the step; empty: it is not."""
        self._say = say
        self._may_wait = False

    def ask_to_pause(self, why: str) -> None:
        """Have the run end after this step with a checkpoint; why: sentence on the cause."""
        self.pause = why

    def end(self, saved: str) -> None:
        """Raise Stopped or Paused if a signal has come or the run is to pause; saved: phrase on the checkpoint."""
        if self.requested:
            raise Stopped(self.requested, saved=saved)
        if self.pause:
            raise Paused(f"{self.pause}; {saved}; the same command goes on")

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Have stop signals raise Stopped in the main thread; the first one within `finishing_the_step` waits."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def install(self) -> None:
        """Install our handler for each stop signal, in place of any other."""
        for number in heeded():
            signal.signal(number, self._handle)

    def _handle(self, signal_number: int, _: FrameType | None) -> None:
        if self._may_wait and not self.requested:
            self.requested = signal_number
            self._say("stopping after this step, with a checkpoint (once more: at once, without)")
            return
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # a further one must not interrupt the cleaning up
        raise Stopped(signal_number)

    @contextmanager
    def finishing_the_step(self) -> Iterator[None]:
        """Note a first stop signal in `requested`, instead of raising Stopped, while the block runs."""
        self._may_wait = True
        try:
            yield
        finally:
            self._may_wait = False
