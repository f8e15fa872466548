"""Processes that generate responses outside of the actor's pool.

    RolloutPool       A lost process ends the attempt.
    ReplaceablePool   Lost processes are replaced while the pools that train live on.
    Servers           Servers run elsewhere and may come and go.

`step_models.ApartRollout` makes the calls on them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from rlhf_trainer.errors import CommunicationError
from rlhf_trainer.telemetry import CONTROLLER, Report

if TYPE_CHECKING:  # a graph of a step is made without Ray
    from rlhf_trainer.controller.worker_group import CallLog, WorkerGroup

REPLACEMENTS = "rollout_replacements"
MAX_REPLACEMENTS = 3
"""Most replacements in a row without responses in between; the next loss ends the attempt."""


class RolloutPool:
    """Processes of the generators in a pool of their own; the loss of one ends the attempt."""

    def calls(self) -> AbstractContextManager[None]:
        """Return a context for calls on these processes, and for calls that wait for them."""
        return nullcontext()

    def settle(self, step: int | None = None) -> None:
        """Wait for the calls made in `calls`, all or up to the last of `step`; CommunicationError if a rank is lost."""

    def gather(self) -> None:
        """Join the actor's ranks and all processes that get the actor's weights in one torch.distributed group."""

    def replace(self, error: CommunicationError) -> None:
        """Replace the processes by new ones, where all calls must be made again; raise the error if this is no help."""
        raise error


class ReplaceablePool(RolloutPool):
    """Pool whose processes are replaced together: ranks of one engine cannot do without each other."""

    def __init__(self, group: WorkerGroup, log: CallLog, *, deadline: float, build: Callable[[], None]) -> None:
        """build: builds the workers of the group, and joins them with the actor's ranks."""
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
        """Return a report of the replacements since the last call of `drain`, which may have been between two steps."""
        report, self._report = self._report, Report(sums={REPLACEMENTS: 0.0})
        return report

    def replace(self, error: CommunicationError) -> None:
        """Replace the processes; raise the error if no rank has died, or if too many have."""
        lost = [str(rank) for rank in self._group.inspect() if rank.is_dead]
        if not lost or self._in_a_row == MAX_REPLACEMENTS:
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
    """External servers. Weights go to the servers that are reachable at that moment."""

    def __init__(
        self, found: Callable[[], list[tuple[str, int]]], join: Callable[[list[tuple[str, int]]], None]
    ) -> None:
        """found: gives the servers that are to join, each (machine, ranks); none if they have joined.

        join: forms the group of these servers and of the actor's ranks.
        """
        self._found, self._join = found, join

    def gather(self) -> None:
        """Form a new group if other servers are reachable than before; its first exchange brings all weights."""
        if servers := self._found():
            self._join(servers)
