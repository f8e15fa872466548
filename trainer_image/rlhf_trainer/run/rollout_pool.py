"""What becomes of generators that are lost, while the pools that train live on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rlhf_trainer.controller.worker_group import CallLog, WorkerGroup
from rlhf_trainer.errors import CommunicationError
from rlhf_trainer.run.assembly import RolloutPool
from rlhf_trainer.telemetry import CONTROLLER, Report

REPLACEMENTS = "rollout_replacements"
MOST_IN_A_ROW = 3
"""Replacements without responses in between; then something is wrong that new processes do not mend."""


class ReplaceableRolloutPool(RolloutPool):
    """A pool whose processes are replaced together: ranks of one engine cannot do without each other."""

    def __init__(self, group: WorkerGroup, log: CallLog, *, deadline: float, build: Callable[[], None]) -> None:
        """build: makes the workers of the group, and joins them with the actor's ranks."""
        self._group, self._log, self._deadline, self._build = group, log, deadline, build
        self._in_a_row = 0
        self._report = Report(sums={REPLACEMENTS: 0.0})

    def calls(self) -> AbstractContextManager[None]:
        return self._log.aside()

    def settle(self, step: int | None = None) -> None:
        self._log.settle(deadline=self._deadline, step=step)
        if step is not None:
            self._in_a_row = 0

    def drain(self) -> Report:
        """What happened since the last call, which may have been between two steps."""
        report, self._report = self._report, Report(sums={REPLACEMENTS: 0.0})
        return report

    def replace(self, error: CommunicationError) -> None:
        """As the base says; there can be none where no rank has died, or too many have."""
        lost = [str(rank) for rank in self._group.inspect() if rank.is_dead]
        if not lost or self._in_a_row == MOST_IN_A_ROW:
            raise error
        self._in_a_row += 1
        self._report.sums[REPLACEMENTS] += 1
        then = "new processes generate again what was under way"
        self._report.warnings[REPLACEMENTS] = f"{', '.join(lost)}; {then}"
        try:
            with self._log.recorder.span(CONTROLLER, f"replace the processes of {self._group.name}"):
                self._group.restart()
                self._log.abandon(deadline=self._deadline)
                self._build()
        except CommunicationError as another:
            self.replace(another)


class Servers(RolloutPool):
    """Servers that run elsewhere, of which those that are there when weights are sent get them."""

    def __init__(self, rollout: Any, join: Callable[[list[tuple[str, int]]], None]) -> None:
        """join: forms the group of these, each a machine and its ranks, and of the actor's ranks."""
        self._rollout, self._join = rollout, join

    def gather(self) -> None:
        """A new group, whose first exchange brings all weights, if others are there than before."""
        if servers := self._rollout.found().result()[0]:
            self._join(servers)
