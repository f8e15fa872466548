"""Log of a job's calls: messages sent to the ranks of all worker groups, waits for their end, readers of fields."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlhf_api.spec.deadlines import CALL_SECONDS, STEPS, deadline_by
from rlhf_trainer.controller.batch import PayloadMeter
from rlhf_trainer.controller.dispatch import Readers, Streams
from rlhf_trainer.controller.message import Message, failed, get, wait
from rlhf_trainer.controller.slot_process import Outcome
from rlhf_trainer.errors import CommunicationError
from rlhf_trainer.telemetry import CONTROLLER, Recorder, Report

if TYPE_CHECKING:
    from rlhf_trainer.controller.worker_group import WorkerGroup


class CallDeadline:
    """Deadline of a step's calls; if the user has set none, `STEPS` times the longest step so far."""

    def __init__(self, seconds: float, *, predicted: float | None, least: float) -> None:
        """seconds: deadline in the first step, or in all steps if `predicted`, a step's expected seconds, is None."""
        self.seconds = self.of_others = seconds
        """Deadline of the next step's calls (`seconds`), and of calls outside steps (`of_others`)."""
        self.is_derived = bool(predicted)
        self._least, self._longest = least, predicted or 0.0

    def __str__(self) -> str:
        """Return the rule as a sentence for the start of a run."""
        after = f"after the first step {self._after(0.0):.0f} s, or {STEPS} times the longest step if that is more"
        return f"a call may take {self.seconds:.0f} s (training.callDeadlineSeconds is not set); {after}"

    def note_step(self, seconds: float) -> None:
        """Set the next deadline by the seconds of a step; the first step, which compiles and loads, has its own."""
        if self.is_derived:
            self.seconds = self._after(seconds)

    def _after(self, seconds: float) -> float:
        self._longest = max(self._longest, seconds)
        return max(self._least, float(deadline_by(self._longest, CALL_SECONDS)))


class CallLog:
    """State that all worker groups of a job share: the readers of each field, and the calls sent to ranks."""

    def __init__(self, *, keeps: int = 0) -> None:
        """keeps: number of earlier steps whose added fields a call may still read."""
        self.keeps = keeps
        self.recorder = Recorder()
        self.readers = Readers()
        self.numbers = itertools.count()
        self.groups: list[WorkerGroup] = []
        self.streams = Streams()
        self.meter = PayloadMeter()
        self.messages: list[Message] = []
        """Lists of calls that were sent to ranks, for which `drain` waits."""
        self._drained: list[Message] = []
        self._aside: list[Message] = []
        """Lists of calls made within `aside`; `wait` and `drain` skip them until `settle` has waited for them."""
        self.abort: Callable[[], None] = lambda: None
        """Function that makes ranks give up a call of `aside` that has lost a rank; NCCL would let them wait."""

    def wait(self, *, deadline: float) -> None:
        """Wait until every call made so far has ended."""
        self.send()
        self._outcomes(self.messages, deadline)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Set the calls in the `with` block aside: `wait` and `drain` skip them until `settle` has waited for them."""
        self.send()
        others, self.messages = self.messages, self._aside
        try:
            yield
            self.send()
        finally:
            self.messages = others

    def settle(self, *, deadline: float, step: int | None = None) -> None:
        """Wait for the calls that were set aside, up to the last of `step`; then `wait` and `drain` include them."""
        wanted = None if step is None else max(step, 0)  # evaluations have steps 0, -1, ...; their messages have 0
        count = max((n for n, each in enumerate(self._aside, 1) if wanted in (None, each.step)), default=0)
        self._outcomes(self._aside[:count], deadline)
        self.messages += self._aside[:count]
        self._aside = self._aside[count:]

    def abandon(self, *, deadline: float) -> None:
        """Wait until the calls that were set aside have ended or failed, and forget them."""
        self.abort()
        pending = [each.ended for each in self._aside]
        while pending:
            arrived, pending = wait(pending, seconds=deadline, look=self.abort)  # a rank may begin such a call only now
            if not arrived:
                raise CommunicationError(f"a call without its other ranks did not end within {deadline:.0f} s")
        self._aside = []

    def drain(self, *, deadline: float, step: int | None = None) -> list[Report]:
        """Wait until every call made so far has ended; return the calls' reports in order, and last the controller's.

        step: leave out the calls of later steps.
        """
        self.send()
        last = math.inf if step is None else step
        self._drained = [each for each in self.messages if each.step <= last]
        self.messages = [each for each in self.messages if each.step > last]
        calls = sum(len(message.calls) for message in self._drained)
        with self.recorder.span(CONTROLLER, f"wait for {calls} calls"):
            ended = self._outcomes(self._drained, deadline)
        in_order = sorted(itertools.chain.from_iterable(ended), key=operator.attrgetter("number"))
        return [*(outcome.report for outcome in in_order), self.recorder.drain()]

    def queue(self) -> dict[str, float]:
        """Return numbers of complete batches and of tokens generated ahead, `queue/batches` and `queue/tokens`."""
        written: dict[int, list[Sequence[Outcome] | None]] = {}
        for message in (*self.messages, *self._aside):
            if message.step:  # calls of step 0 bring weights
                written.setdefault(message.step, []).append(message.outcomes())
        whole = sum(None not in parts for parts in written.values())
        ended = [outcome for parts in written.values() for part in parts for outcome in part or ()]
        tokens = sum(outcome.report.sums.get("tokens", 0.0) for outcome in ended)
        return {"queue/batches": whole, "queue/tokens": tokens}

    def send(self) -> None:
        """Send the calls recorded so far to the ranks of all worker groups."""
        for group in self.groups:
            group.send()

    def _outcomes(self, messages: Sequence[Message], deadline: float) -> list[Sequence[Outcome]]:
        ended = [message.ended for message in messages]
        return get(ended, deadline=deadline, quiet_seconds=self._quiet_seconds, look=self._look_aside)

    def _look_aside(self) -> None:
        """Abort the calls that were set aside if one has failed: awaited calls may be queued behind them on a rank."""
        if failed(each.ended for each in self._aside):
            self.abort()

    def unfinished_calls(self, pool: str, rank: int) -> str:
        """Return as text the calls of the rank's first message that failed or has not ended; empty if there is none."""
        messages = [*self._drained, *self.messages, *self._aside]
        mine = (each for each in messages if (each.pool, each.rank) == (pool, rank))
        return next((str(each) for each in mine if each.outcomes() is None), "")

    def _quiet_seconds(self) -> float:
        """Return the seconds since the last end of a call on any rank that answers; infinite if no rank answers."""
        ranks = [rank.process for group in self.groups for rank in group.inspect()]
        return min((process.quiet_seconds for process in ranks if process), default=math.inf)
