"""Batches of a job's steps; those of the next steps are generated while a step trains (`rollout.maxStaleness`).

With N = 1, and P the policy after so many updates:

    step 1               step 2               step 3
    train on rows of P0  train on rows of P0  train on rows of P1  ...
    generate for 1, 2 with P0  3 with P1            4 with P2.

So the rows of step s are of policy s - 1 - N at least, where 0 stands for what is less.
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
    """`queue/batches` and `queue/tokens` of steps that come later: what the rollout pool has written of them by now."""
    written: dict[int, list[Sequence[Outcome] | None]] = {}
    for message in messages:
        if message.step:  # others bring weights
            written.setdefault(message.step, []).append(message.outcomes())
    whole = sum(None not in parts for parts in written.values())
    ended = (outcome for parts in written.values() for part in parts for outcome in part or ())
    return {"queue/batches": whole, "queue/tokens": sum(outcome.report.sums.get("tokens", 0.0) for outcome in ended)}


class Lookahead:
    """Gives the batch of each step, and has so many later ones generated as the job allows."""

    def __init__(self, job: Job, runtime: Runtime, *, first_step: int, total_steps: int) -> None:
        self._job, self._runtime, self._total_steps = job, runtime, total_steps
        self._staleness = job.spec.rollout.max_staleness
        self._next = first_step
        self._batches: dict[int, Rows] = {}

    def batch(self, step: int) -> Rows:
        """The prompts of a step; the actor has been asked for the responses of those that are stale when read."""
        last = min(step + self._staleness, self._total_steps)
        for number in range(self._next, last + 1):
            blank = self._runtime.blank(number, self._job.sequences_per_step)
            self._batches[number] = training_batch(self._job, self._runtime.models["data"], blank)
            if self._staleness:
                self._runtime.models["actor"].generate_ahead(self._batches[number])
        self._next = last + 1
        return self._batches.pop(step)
