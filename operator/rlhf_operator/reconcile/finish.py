"""End of an attempt, and of the job."""

import zlib
from collections.abc import Sequence
from datetime import timedelta
from itertools import takewhile
from typing import Final

from rlhf_api.exit_codes import ExitCode
from rlhf_api.status import AttemptEnd, Failure, Output
from rlhf_operator import conditions, evidence
from rlhf_operator.actions import Delete
from rlhf_operator.evidence import CLASSES
from rlhf_operator.failure import action_on
from rlhf_operator.placement.capacity import counted
from rlhf_operator.reconcile import attempt_status, cleanup, sandboxes
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.reconcile.giving import GivenRoom
from rlhf_operator.resources import storage
from rlhf_operator.snapshot import ObservedJob
from rlhf_operator.times import parsed, timestamp

UNQUEUED: Final = frozenset({attempt_status.NOT_QUEUED[0], attempt_status.IGNORED[0]})
"""Reasons of the condition QuotaReserved=True for which Kueue has granted no quota."""
RATE_SECONDS: Final = 3600.0
"""Span in seconds over which a message adds up the failures that do not count."""
SUSPENDS: Final = "The pods end and free their slots; a trainer that has made steps saves a checkpoint first."
MAX_BACKOFF_SECONDS: Final = 300.0
"""Most seconds between two attempts."""


def clean_up(ctx: ReconcileContext) -> None:
    """Delete an ended job's RayJobs and pods, unless kept for debugging, and the job itself after its time to live."""
    if is_kept := cleanup.is_kept(ctx):
        sandboxes.delete(ctx, ctx.snapshot.sandboxes)
    is_clear = is_kept or cleanup.clear(ctx)
    ended, ttl = parsed(ctx.status.completion_time), ctx.policy.ttl_seconds_after_finished
    if is_clear and ended is not None and ttl is not None and not ctx.must_wait(ttl - ctx.age(ended)):
        ctx.require_live("the job's time to live is over")
        ctx.actions.append(Delete(kind="RLHFJob", name=ctx.snapshot.job.name, uid=ctx.snapshot.job.uid))


def succeed(ctx: ReconcileContext) -> None:
    """Mark the job as succeeded, because its trainer has finished, and free its resources."""
    ctx.require_live("the job has succeeded")
    _end_attempt(ctx, "Succeeded")
    beat = ctx.snapshot.heartbeat
    output = beat.status.output if beat else None
    if ctx.job:
        output = Output(uri=storage.output_uri(ctx.job), digest=output.digest if output else None)
    ctx.set_status(output=output, completion_time=timestamp(ctx.now), next_attempt_time=None)
    ctx.set_condition("Training", "False", "Finished", "Training has finished.")
    message = f"{ctx.snapshot.job.name} has finished; its model is at {output.uri if output else '?'}."
    ctx.set_condition("Complete", "True", "JobComplete", message)
    cleanup.delete_rayjobs(ctx, but=None)


def fail(ctx: ReconcileContext, reason: str, message: str) -> None:
    """Mark the job as failed for good."""
    ctx.require_live(f"the job fails: {reason}")
    if ctx.is_open:
        _end_attempt(ctx, "Failed")
        ctx.set_record(message=conditions.shortened(message))
    ctx.set_status(completion_time=timestamp(ctx.now), next_attempt_time=None, reserved=())
    ctx.set_condition("Training", "False", "Finished", "No attempt is running.")
    ctx.set_condition("Failed", "True", reason, message)
    if cleanup.is_kept(ctx):
        stay = "its pods stay until the job is deleted (spec.runPolicy.keepPodsOnFailure)"
        ctx.set_condition("ClusterReady", "False", conditions.KEPT, f"Attempt {ctx.status.attempt} has ended; {stay}.")
    else:
        cleanup.delete_rayjobs(ctx, but=None)


def fail_attempt(ctx: ReconcileContext, failure: Failure) -> None:
    """End a failed attempt, and restart or fail the job by its failure rules, else by the failure's reason."""
    ctx.require_live(f"attempt {ctx.status.attempt} has failed: {failure.reason}")
    action, rule = action_on(failure, ctx.policy)
    is_counted = action != "Ignore" and not _is_first_without_start(ctx, failure)
    count = (ctx.status.failed_attempts or 0) + is_counted
    _end_attempt(ctx, "Failed")
    ctx.set_record(
        counted=is_counted,
        reason=failure.reason,
        message=failure.message,
        pod=failure.pod,
        node=failure.node,
        micro_batch_tokens=_too_large(ctx, failure),
    )
    said = f"{failure.message}{_rate(ctx)}"
    what = f"Attempt {ctx.status.attempt} failed ({failure.reason}): {said}"
    ctx.set_status(last_failure=failure.model_copy(update={"rule": rule, "message": said}), failed_attempts=count)
    ctx.add_event("Warning", failure.reason, what)
    if failure.node and CLASSES[failure.reason].is_node_fault and ctx.snapshot.nodes is not None:
        job = f"RLHFJob {ctx.snapshot.job.namespace}/{ctx.snapshot.job.name}"
        ctx.add_event("Warning", "RLHFAttemptFailed", f"{job}: {what}", node=failure.node)
    if action == "Fail":
        fail(ctx, "FailureRule" if rule else failure.reason, what)
    elif is_counted and count > ctx.policy.backoff_limit:
        fail(ctx, "BackoffLimitExceeded", f"{count} attempts failed, {ctx.policy.backoff_limit} may. {what}")
    else:
        ctx.set_condition("Training", "False", conditions.RESTARTING, what)
        if action == "Remap" or failure.reason == "NodeLost":
            ctx.set_status(mapping=None, reserved=())
        cleanup.delete_rayjobs(ctx, but=None)
        _pause(ctx)


def _is_first_without_start(ctx: ReconcileContext, failure: Failure) -> bool:
    """Whether nothing ran in a failed attempt because of a start problem, unlike in the failed attempt before it."""
    ended = [each.reason for each in ctx.status.attempts if each.outcome == "Failed"]
    is_first = not ended or ended[-1] not in evidence.START_SECONDS
    return failure.reason in evidence.START_SECONDS and ctx.condition_since("ClusterReady") is None and is_first


def _rate(ctx: ReconcileContext) -> str:
    """Return a clause on the uncounted failures of the last hour, for the end of a message; empty for less than two."""
    ends = [parsed(each.end_time) for each in ctx.status.attempts if each.outcome == "Failed" and not each.counted]
    number = sum(ctx.age(each) < RATE_SECONDS for each in ends)
    return f"; {number} of the last {len(ctx.status.attempts)} attempts failed within an hour, uncounted" * (number > 1)


def withdraw(ctx: ReconcileContext, why: str, awaited: Sequence[str] = ()) -> None:
    """End an attempt whose pods find no nodes; the job waits for its turn again, after a pause for other jobs.

    awaited: nodes that did not come in time; the group of a node that is still missing is avoided for a while.
    """
    ctx.require_live(f"attempt {ctx.status.attempt} is withdrawn")
    still_to_come = {each.name for each in ctx.snapshot.nodes or ()}
    blamed = max(awaited, key=still_to_come.__contains__, default=None)
    _end_attempt(ctx, "Withdrawn")
    message = f"Attempt {ctx.status.attempt} is withdrawn, which is no failure: {why}"
    ctx.set_record(message=conditions.shortened(message), node=blamed)
    ctx.set_condition("QuotaReserved", "False", "Withdrawn", message)
    fail_if_queued_too_long(ctx)
    if not ctx.has_ended:
        ctx.set_condition("Training", "False", "NotStarted", message)
        cleanup.delete_rayjobs(ctx, but=None)
        _pause(ctx)


def fail_if_queued_too_long(ctx: ReconcileContext) -> None:
    """Fail a job that waits in line, or for Kueue, longer than spec.runPolicy.queueDeadlineSeconds."""
    limit = ctx.policy.queue_deadline_seconds
    if limit is not None and not ctx.must_wait(limit - ctx.age(ctx.condition_since("QuotaReserved", "False"))):
        fail(ctx, "QueueDeadlineExceeded", f"no room for {limit} s, spec.runPolicy.queueDeadlineSeconds")


def _too_large(ctx: ReconcileContext, failure: Failure) -> int | None:
    """Return the micro-batch tokens for which the attempt had no memory; None if they are unset or not to blame."""
    # The message may name another field that would help.
    names_another = "spec." in failure.message and "microBatchTokens" not in failure.message
    if failure.exit_code != ExitCode.OUT_OF_MEMORY or names_another:
        return None
    mapped = ctx.status.mapping.micro_batch_tokens if ctx.status.mapping else None
    return mapped or (ctx.job.spec.training.micro_batch_tokens if ctx.job else None)


def fail_if_too_late(ctx: ReconcileContext, running_seconds: float = 0.0) -> float | None:
    """Fail the job if spec.runPolicy.activeDeadlineSeconds is over; return the seconds left, None if it is unset."""
    deadline = ctx.policy.active_deadline_seconds
    if deadline is None:
        return None
    left = deadline - (ctx.status.active_seconds or 0) - running_seconds
    if left <= 0:
        fail(ctx, "DeadlineExceeded", f"all attempts together took {deadline} s, spec.runPolicy.activeDeadlineSeconds")
    return left


def suspend(ctx: ReconcileContext) -> None:
    """End an attempt because the user suspends the job; its pods save a checkpoint when they are deleted."""
    ctx.require_live("the job is suspended")
    _end_attempt(ctx, "Suspended")
    ctx.set_status(next_attempt_time=None)
    ctx.set_condition("Training", "False", "Suspended", "No attempt is running.")
    ctx.set_condition("Suspended", "False", conditions.SUSPENDING, SUSPENDS)
    cleanup.delete_rayjobs(ctx, but=None)


def pause(ctx: ReconcileContext) -> None:
    """End an attempt whose trainer has saved a checkpoint and paused; the job is suspended until its spec changes."""
    ctx.set_status(paused_generation=ctx.snapshot.job.generation)
    suspend(ctx)


def remap(ctx: ReconcileContext) -> None:
    """End an attempt because another placement is better; its pods save a checkpoint when they are deleted."""
    ctx.require_live("the job takes another placement")
    message = "The attempt saves a checkpoint; the next one has the placement that measured steps show to be better."
    _begin_anew(ctx, "Remapped", message)


def give_room(ctx: ReconcileContext, given: GivenRoom) -> None:
    """End an attempt because a job in line needs its room, or a part of it; the next attempt keeps the rest."""
    whose = " and ".join(f"{each.namespace}/{each.name}" for each in given.to)
    mapping, before = given.giver.status.mapping, ctx.status.mapping
    ctx.require_live(f"{whose} needs the job's room", alone=True)
    if mapping is None or before is None:
        message = f"Attempt {ctx.status.attempt} had begun before its turn and gives its room to {whose}."
        _begin_anew(ctx, "Yielded", message)  # in its turn the job may have more room
        return
    what = f"makes room for {whose} of higher priority; the job goes on with {mapping.nodes}"
    of = counted(before.nodes, "node")
    _begin_anew(ctx, "Resized", f"Attempt {ctx.status.attempt} {what} of its {of}.", given.giver)


def take_nodes_back(ctx: ReconcileContext, larger: ObservedJob) -> None:
    """End an attempt because the job can have nodes again that it gave away; the next attempt has the larger room."""
    ctx.require_live("the job takes nodes back", alone=True)
    before, now = ctx.status.mapping, larger.status.mapping
    if before and now:
        back = f"takes back {counted(now.nodes - before.nodes, 'node')} that it had given away"
        _begin_anew(ctx, "Resized", f"The job {back}; it goes on with {now.nodes}.", larger)


def _begin_anew(ctx: ReconcileContext, outcome: AttemptEnd, message: str, job: ObservedJob | None = None) -> None:
    """End an attempt and let the next one follow at once, with the mapping and the room of `job` if given."""
    _end_attempt(ctx, outcome)
    ctx.set_record(message=message)
    mapping, reserved = (job.status.mapping, job.status.reserved) if job else (None, ())
    ctx.set_status(next_attempt_time=None, mapping=mapping, reserved=reserved)
    ctx.set_condition("Training", "False", conditions.RESTARTING, message)
    cleanup.delete_rayjobs(ctx, but=None)


def active_seconds(ctx: ReconcileContext) -> float:
    """Return the seconds for which the current attempt has had its slots; time in a queue does not count."""
    if ctx.record is None or not ctx.holds("QuotaReserved"):
        return 0.0
    began, reserved = parsed(ctx.record.start_time), ctx.condition_since("QuotaReserved")
    return min((ctx.age(each) for each in (began, reserved) if each), default=0.0)


def _end_attempt(ctx: ReconcileContext, outcome: AttemptEnd) -> None:
    if outcome != "Withdrawn":
        ctx.set_status(active_seconds=(ctx.status.active_seconds or 0) + int(active_seconds(ctx)))
    if outcome != "Failed" or (ctx.record and ctx.record.backfilled):  # else the next attempt keeps the room
        ctx.set_status(reserved=())
    if ctx.status.mapping:
        kept = tuple(each for each in ctx.status.reserved if not each.extra)
        ctx.set_status(mapping=ctx.status.mapping.at_start(), reserved=kept)
    has_trained = ctx.record is not None and ctx.record.first_step is not None
    last_step = ctx.status.progress.step if ctx.status.progress and has_trained else None
    ctx.set_record(outcome=outcome, end_time=timestamp(ctx.now), last_step=last_step)
    ctx.set_condition("ClusterReady", "False", "Ended", f"The cluster of attempt {ctx.status.attempt} is taken down.")
    for each in ctx.status.conditions:
        if each.type in ("Slow", "SandboxesReady"):
            ctx.set_condition(each.type, "False", "Ended", f"Attempt {ctx.status.attempt} has ended.")
    reserved = ctx.condition("QuotaReserved")
    if reserved is not None and reserved.reason not in UNQUEUED:
        message = "No attempt is running; its quota goes back when its pods are gone."
        ctx.set_condition("QuotaReserved", "False", "Ended", message)


def _pause(ctx: ReconcileContext) -> None:
    """Set the time of the next attempt; the pause doubles with each failure or repeated withdrawal, with jitter."""
    ends = [each.outcome for each in ctx.status.attempts]
    run = takewhile(lambda end: end == "Withdrawn", reversed(ends))  # not the job's fault, so counted apart
    failures = len(list(run)) or ends.count("Failed")
    pause = ctx.policy.restart_backoff_seconds * 2.0 ** max(failures - 1, 0)
    seed = f"{ctx.snapshot.job.uid}/{ctx.status.attempt}"
    seconds = min(pause * (1 + zlib.crc32(seed.encode()) % 1000 / 5000), MAX_BACKOFF_SECONDS)
    ctx.set_status(next_attempt_time=timestamp(ctx.now + timedelta(seconds=seconds)))
    ctx.requeue_after(seconds)
