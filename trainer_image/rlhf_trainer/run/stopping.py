"""SIGINT, SIGTERM and SIGHUP: a run stops after the step it is in, with a checkpoint; a second one stops it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rlhf_api.exit_codes import ExitCode

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded() -> tuple[signal.Signals, ...]:
    """The signals that stop a run: not SIGHUP, that of a closed terminal, where nohup has had it ignored."""
    return SIGNALS[:2] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else SIGNALS


class Stopped(BaseException):
    """A signal asked the run to stop. No error, so what handles errors lets it pass.

    `exit_code` says which: that of SIGHUP is SIGTERM's.
    """

    def __init__(self, signal_number: int, *, saved: str = "") -> None:
        """saved: where the state is that a later run goes on from, in words."""
        super().__init__(f"stopped by {signal.Signals(signal_number).name}{saved and '; ' + saved}")
        self.exit_code = ExitCode.SIGINT if signal_number == signal.SIGINT else ExitCode.SIGTERM


class StopSignals:
    """State of the signals that stop a run."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` tells the user that the run will stop."""
        self.requested: int | None = None
        """The signal that came while a step was running."""
        self._say = say
        self._may_wait = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Signals raise Stopped in the main thread while the block runs, but the first one during steps waits."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def install(self) -> None:
        """Put our handlers in place of whatever is there."""
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
        """While the block runs, a first signal is only noted in `requested`."""
        self._may_wait = True
        try:
            yield
        finally:
            self._may_wait = False
