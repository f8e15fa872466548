"""Forecast of when a job in line may begin, from the predicted ends of the jobs that hold room.

A job whose end is not known, or that has outlasted its prediction, is assumed never to end.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, Self

from rlhf_api.status import Reserved, Status
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.reconcile.room import Group, Room, groups_of, place
from rlhf_operator.snapshot import ObservedJob, Snapshot, inputs_of
from rlhf_operator.times import parsed, since

FORESEEN_SECONDS: Final = 90 * 86400.0
"""Longest time in seconds until a start that is reported."""
ROUNDING: Final = ((2 * 3600.0, 900), (12 * 3600.0, 3600), (math.inf, 6 * 3600))
"""(seconds until a start, multiple of seconds to which its time is rounded up), so that a status seldom changes."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Room on the nodes at later times."""

    snapshot: Snapshot
    holders: tuple[tuple[float, ObservedJob], ...]
    """(predicted seconds until its end, job) of the jobs that hold room."""

    @classmethod
    def of(cls, ctx: ReconcileContext, snapshot: Snapshot) -> Self:
        """Return the forecast without the job of this pass; pods of ended attempts are assumed to be gone."""
        ends = ((remaining_seconds(each, ctx.now), each) for each in ctx.snapshot.holders)
        return cls(snapshot=snapshot, holders=tuple(ends))

    def beside(self, job: ObservedJob, reserved: Sequence[Reserved], end: float = math.inf) -> Self:
        """Return the forecast in which a job holds this room, too. end: seconds until it gives the room back."""
        holder = replace(job, status=job.status.model_copy(update={"reserved": tuple(reserved)}))
        return replace(self, holders=(*self.holders, (end, holder)))

    def start_of(self, pods: Sequence[Group]) -> tuple[float, Room]:
        """Return (seconds until all pods of an attempt have room, that room); inf seconds: the time is not known."""
        ends = sorted({0.0, *(end for end, _ in self.holders if end < math.inf)})
        found = bisect_left(ends, True, key=lambda end: not self.room_at(end, pods).lacks)
        start = ends[found] if found < len(ends) else math.inf
        return start, self.room_at(start, pods)

    def room_at(self, seconds: float, pods: Sequence[Group]) -> Room:
        """Return the trial placement of an attempt's pods, `seconds` from now."""
        left = [job for end, job in self.holders if end > seconds]
        return place(pods, self.snapshot.taken_only_by(left))


def expected_start(ctx: ReconcileContext, ahead: Sequence[ObservedJob], pods: Sequence[Group]) -> float:
    """Return the seconds until an attempt may begin, after the jobs ahead in this order; infinite: not known."""
    forecast = Forecast.of(ctx, ctx.snapshot)
    for each in ahead:
        if not (others := pods_of(ctx, each)):
            return math.inf
        start, room = forecast.start_of(others)
        forecast = forecast.beside(each, room.reserved, start + remaining_seconds(each, ctx.now))
    return forecast.start_of(pods)[0]


def start_in_words(seconds: float, now: datetime) -> str:
    """Return a clause that tells an expected start, rounded up."""
    if seconds > FORESEEN_SECONDS:
        return "nobody can say when it begins"
    multiple = next(each for limit, each in ROUNDING if seconds < limit or limit == math.inf)
    moment = math.ceil((now.timestamp() + seconds) / multiple) * multiple
    return f"expected to begin by {datetime.fromtimestamp(moment, now.tzinfo):%Y-%m-%d %H:%M} UTC"


def remaining_seconds(job: ObservedJob, now: datetime) -> float:
    """Return the predicted seconds until a job ends, as if it began now if it waits; inf if unknown or outlasted."""
    status, progress = job.status, job.status.progress
    total, each = _total_steps(job), _step_seconds(status)
    if total is None or not each:
        return math.inf
    record = status.attempts[-1] if status.attempts and status.reserved else None
    if record is None:
        return (total - (status.checkpoint.step if status.checkpoint else 0)) * each
    done, stepped = (progress.step, parsed(progress.last_step_time)) if progress else (0, None)
    since_step = since(max(filter(None, (parsed(record.start_time), stepped)), default=now), now)
    left = (total - done) * each - since_step
    return left if left > 0 else math.inf


def _total_steps(job: ObservedJob) -> int | None:
    """Return the number of steps of a job, as its trainer or its spec says; None if neither does."""
    training = job.spec.get("training")
    told = training.get("totalSteps") if isinstance(training, dict) else None
    total = job.status.progress.total_steps if job.status.progress else told
    return total if isinstance(total, int) else None


def _step_seconds(status: Status) -> float | None:
    """Return the seconds of a step as measured, else as predicted; None if neither is known."""
    progress, mapping = status.progress, status.mapping
    measured = (progress.pace.step_seconds if progress.pace else progress.step_seconds) if progress else None
    return measured or (mapping.measured_step_seconds or mapping.predicted_step_seconds if mapping else None)


def context_of(ctx: ReconcileContext, job: ObservedJob) -> ReconcileContext:
    """Return the context of a pass over another job, for a trial placement."""
    inputs = {
        name: replace(job, name=name, spec={}, status=Status()) for name in inputs_of(job.spec)
    }  # where the inputs are does not matter for a trial
    return ReconcileContext.of(replace(ctx.snapshot, job=job, inputs=inputs), ctx.now, ctx.settings)


def pods_of(ctx: ReconcileContext, waiting: ObservedJob) -> list[Group]:
    """Return the pods of another job's next attempt for a trial placement; none if it has no mapping yet."""
    other = context_of(ctx, waiting)
    if other.job is None or other.status.mapping is None:
        return []
    return groups_of(other.snapshot, other.job, other.status.mapping, ctx.settings)
