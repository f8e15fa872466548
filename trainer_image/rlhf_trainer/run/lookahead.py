"""Batches of a job's steps; responses of later steps are generated while a step trains (`rollout.maxStaleness`).

With N = maxStaleness = 1, and Pk the policy after k updates:

    step 1               step 2               step 3
    train on rows of P0  train on rows of P0  train on rows of P1  ...
    generate for 1, 2 with P0  3 with P1            4 with P2.

So the rows of step s are written by policy max(0, s - 1 - N) or a newer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rlhf_api.job import Job
from rlhf_trainer.run.evaluation import Runtime
from rlhf_trainer.run.step_models import Rows, training_batch

if TYPE_CHECKING:  # without Ray there is no rollout pool
    from rlhf_trainer.controller.message import Message
    from rlhf_trainer.controller.slot_process import Outcome


def queue(messages: Iterable[Message]) -> dict[str, float]:
    """Return `queue/batches` and `queue/tokens`: complete batches and tokens generated for later steps by now."""
    written: dict[int, list[Sequence[Outcome] | None]] = {}
    for message in messages:
        if message.step:  # others bring weights
            written.setdefault(message.step, []).append(message.outcomes())
    whole = sum(None not in parts for parts in written.values())
    ended = (outcome for parts in written.values() for part in parts for outcome in part or ())
    return {"queue/batches": whole, "queue/tokens": sum(outcome.report.sums.get("tokens", 0.0) for outcome in ended)}


class Lookahead:
    """Source of each step's batch, which has later batches generated ahead as far as `rollout.maxStaleness` allows."""

    def __init__(self, job: Job, runtime: Runtime, *, first_step: int, total_steps: int) -> None:
        self._job, self._runtime, self._total_steps = job, runtime, total_steps
        self._staleness = job.spec.rollout.max_staleness
        self._next = first_step
        self._batches: dict[int, Rows] = {}

    def batch(self, step: int) -> Rows:
        """Return the batch of a step; request the responses of steps up to `rollout.maxStaleness` after it ahead."""
        last = min(step + self._staleness, self._total_steps)
        for number in range(self._next, last + 1):
            blank = self._runtime.blank(number, self._job.sequences_per_step)
            self._batches[number] = training_batch(self._job, self._runtime.models["data"], blank)
            if self._staleness:
                self._runtime.models["actor"].generate_ahead(self._batches[number])
        self._next = last + 1
        return self._batches.pop(step)
