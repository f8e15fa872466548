"""The time before the first attempt, between two attempts, and of suspension."""

from __future__ import annotations

from typing import Final

from rlhf_api.job import Job
from rlhf_api.status import Attempt, MappedPlacement
from rlhf_operator import conditions, names, placement, resources
from rlhf_operator.plan import Create
from rlhf_operator.reconcile import cleanup, ended, inputs, sight
from rlhf_operator.reconcile.turn import Turn
from rlhf_operator.times import parsed, timestamp

MAP_AGAIN_SECONDS: Final = 60.0
"""Nodes come and go without an event about the job."""
MOST_PAUSE: Final = 2 * ended.LONGEST_PAUSE
"""A nextAttemptTime further ahead than this comes from a clock that has been set back."""


def advance(turn: Turn) -> None:
    """One step nearer to the next attempt, as far as things allow."""
    is_clear = cleanup.clear(turn)
    if turn.snapshot.job.spec.get("suspend") is True:
        _rest(turn, is_clear=is_clear)
        return
    _wake(turn)
    job = inputs.accepted(turn)
    if job is None or not inputs.ready(turn, job) or _is_too_late(turn):
        return
    if not is_clear:
        left = ", ".join(sorted(pod.name for pod in turn.snapshot.pods)[:3]) or "the RayJob"
        if turn.status.attempt is not None:
            turn.say("Training", "False", conditions.RESTARTING, f"Waits until {left} of the last attempt is gone.")
        return
    if _pauses(turn):
        return
    if (mapping := _mapped(turn, job)) is not None:
        _begin(turn, job, mapping)


def _rest(turn: Turn, *, is_clear: bool) -> None:
    if turn.record is not None and turn.record.outcome == "Running":
        ended.suspend(turn)  # it was named and never made
    turn.set(next_attempt_time=None)
    if is_clear:
        turn.say("Suspended", "True", "SuspendedByUser", "spec.suspend is true; set it to false to go on.")
    else:
        message = "The job saves a checkpoint and frees its slots."
        turn.say("Suspended", "False", conditions.SUSPENDING, message)


def _wake(turn: Turn) -> None:
    if conditions.holds(turn.status.conditions, "Suspended"):
        turn.set(mapping=None)  # other nodes may be there by now
    if conditions.found(turn.status.conditions, "Suspended") is not None:
        turn.say("Suspended", "False", "Resumed", "spec.suspend is false.")


def _is_too_late(turn: Turn) -> bool:
    deadline = turn.policy.active_deadline_seconds
    if deadline is None or (turn.status.active_seconds or 0) < deadline:
        return False
    ended.fail(
        turn, "DeadlineExceeded", f"all attempts together took {deadline} s, spec.runPolicy.activeDeadlineSeconds"
    )
    return True


def _pauses(turn: Turn) -> bool:
    """Whether the next attempt is to come later."""
    after = parsed(turn.status.next_attempt_time)
    rest = (after - turn.now).total_seconds() if after else 0.0
    if not 0 < rest <= MOST_PAUSE:
        return False
    turn.again(rest)
    return True


def _mapped(turn: Turn, job: Job) -> MappedPlacement | None:
    """Where the models will live: as before, unless the spec or the inputs have changed or the nodes have no room."""
    have = turn.status.mapping
    if have is not None and placement.still_fits(job, have, turn.snapshot, turn.settings):
        if not conditions.holds(turn.status.conditions, "Mapped"):
            turn.say("Mapped", "True", "Mapped", _summary(have))
        return have
    turn.need_live("the next attempt is mapped")
    placed = placement.placed(job, turn.snapshot, turn.settings)
    if placed.mapping is None:
        turn.set(mapping=None)
        turn.say("Mapped", "False", placed.reason, placed.message)
        turn.again(MAP_AGAIN_SECONDS)
        return None
    turn.set(mapping=placed.mapping)
    turn.say("Mapped", "True", placed.reason, placed.message or _summary(placed.mapping))
    turn.tell("Normal", "Mapped", placed.message or _summary(placed.mapping))
    return placed.mapping


def _summary(mapping: MappedPlacement) -> str:
    pools = "; ".join(f"{', '.join(pool.models)}: {pool.nodes} x {pool.slots_per_node}" for pool in mapping.pools)
    return f"{mapping.slots} {mapping.device} slots ({pools})."


def _begin(turn: Turn, job: Job, mapping: MappedPlacement) -> None:
    """Name the next attempt in the status, and only then make it; one that was named and never made comes first."""
    was_named = turn.record is not None and turn.record.outcome == "Running"
    number = turn.status.attempt or 0
    number = number if was_named and number else number + 1
    if inputs.conflict(turn, names.rayjob(job.name, number)):
        return
    turn.need_live(f"attempt {number} begins")
    queue = turn.snapshot.job.labels.get(names.QUEUE) or None
    start = turn.record.start_time if was_named and turn.record else timestamp(turn.now)
    turn.begin_record(Attempt(attempt=number, start_time=start, slots=mapping.slots))
    turn.set(
        start_time=turn.status.start_time or start,
        failed_attempts=turn.status.failed_attempts or 0,
        next_attempt_time=None,
        ray_job_name=None,
        head_pod=None,
        queue=queue,
    )
    if queue:
        turn.say("QuotaReserved", "False", "Pending", f"Attempt {number} waits to be admitted by queue {queue}.")
    else:
        turn.say("QuotaReserved", "True", *sight.NOT_QUEUED)
    turn.say("ClusterReady", "False", "Starting", f"RayJob {names.rayjob(job.name, number)} is made.")
    turn.say("Training", "False", "NotStarted", f"Attempt {number} has not begun to train.")
    if (refused := turn.snapshot.refused) is not None:
        turn.say("Accepted", "False", refused.reason, refused.message)
    made = resources.for_attempt(turn.snapshot, job, mapping, turn.settings, attempt=number)
    turn.actions.extend(Create(manifest=each) for each in made)
