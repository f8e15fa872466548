"""An attempt that is under way: updates its status, and decides whether it has succeeded, failed or hangs."""

import re
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from rlhf_api.exit_codes import ExitCode
from rlhf_api.spec.deadlines import STEP_SECONDS, deadline_by
from rlhf_api.spec.run_policy import Reason
from rlhf_api.status import Failure
from rlhf_operator import conditions, evidence, failure, names, observed_attempt
from rlhf_operator.placement.map_job import better
from rlhf_operator.placement.review import measure_pace
from rlhf_operator.reconcile import attempt_status, cleanup, elastic, finish, giving, line, sandboxes
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.snapshot import ObservedPod
from rlhf_operator.times import parsed, timestamp

UNSCHEDULABLE_SECONDS: Final = 120.0
"""Seconds for which pods may find no node although room was reserved: the scheduler is busy, or other pods took it."""
UNRELATED_TO_ROOM: Final = re.compile("volume|free storage|scheduling gates", re.IGNORECASE)
"""Pattern of scheduler messages about a pod that waits for a volume, its storage or a scheduling gate, not for room."""
ORDINARY: Final = 2
"""Number of an attempt's first steps that are not ordinary, as they may compile and load."""
BETTER: Final = "BetterPlacement"
CLOCK_SECONDS: Final = 2.0
"""Tolerance in seconds for a time in the status that lies ahead; such times are whole seconds."""


def check(ctx: ReconcileContext) -> None:
    """Update the status from what was observed, and end the attempt if it has succeeded, failed or been suspended."""
    rayjob = ctx.snapshot.current_rayjob()
    cleanup.delete_rayjobs(ctx, but=rayjob.name if rayjob else None)
    attempt_status.record_start(ctx)
    has_advanced = attempt_status.update_progress(ctx)
    if _has_succeeded(ctx):
        finish.succeed(ctx)
    elif ctx.snapshot.job.spec.get("suspend") is True:
        finish.suspend(ctx)
    elif observed_attempt.exit_code(ctx.snapshot) == ExitCode.PAUSED:
        finish.pause(ctx)
    elif attempt_status.is_queued(ctx):
        attempt_status.set_queued(ctx)
        finish.fail_if_queued_too_long(ctx)
    else:
        attempt_status.set_quota_reserved(ctx)
        found = _failure(ctx, has_advanced=has_advanced)
        if found is None:
            _go_on(ctx)
        elif _has_waited(ctx, failure.seconds_to_wait(found, ctx.snapshot)):
            finish.fail_attempt(ctx, found)


def _go_on(ctx: ReconcileContext) -> None:
    if why := _lacks_quota(ctx):
        finish.withdraw(ctx, why)
        return
    if why := _is_pushed_out(ctx):
        finish.withdraw(ctx, why, awaited=ctx.coming_nodes)
        return
    waiting = line.waiting_jobs(ctx)
    if (given := giving.find_room_to_give(ctx, waiting)) is not None:
        finish.give_room(ctx, given)
        return
    if (larger := giving.find_nodes_to_take_back(ctx, waiting)) is not None:
        finish.take_nodes_back(ctx, larger)
        return
    if ctx.snapshot.in_line and ctx.job and ctx.job.spec.resources.max_nodes:
        ctx.requeue_after(line.RECHECK_SECONDS)  # jobs in line come and go without an event about this one
    if (soon := evidence.seconds_until_failure(ctx.snapshot, ctx.now)) is not None:
        ctx.requeue_after(soon)
    attempt_status.set_cluster_ready(ctx)
    _name_deadline(ctx)
    attempt_status.set_training(ctx)
    elastic.resize(ctx)
    sandboxes.keep(ctx)  # last: actions that follow a refused pod are not done
    left = finish.fail_if_too_late(ctx, finish.active_seconds(ctx))
    if left is None or ctx.must_wait(left):
        _review_placement(ctx)


def _review_placement(ctx: ReconcileContext) -> None:
    """Compare measured steps once with predictions, and end the attempt for a better placement if the job wants it."""
    beat, mapping = ctx.snapshot.current_heartbeat(), ctx.status.mapping
    progress = beat.status.progress if beat else None
    if progress is None or progress.pace is None or mapping is None or ctx.job is None or ctx.record is None:
        return
    ctx.set_status(mapping=mapping.model_copy(update={"measured_step_seconds": progress.pace.step_seconds}))
    report = ctx.record.measured
    if report is None:
        ctx.require_live("what steps took is compared with predictions")
        report = measure_pace(ctx.job, mapping, progress.pace, progress.step, ctx.snapshot, ctx.settings)
        ctx.set_record(measured=report)
        seen = replace(ctx.snapshot.existing(), job=replace(ctx.snapshot.job, status=ctx.status))
        _report_placement(ctx, better(ctx.job, mapping, seen, ctx.settings))
    mapped, saved = ctx.condition("Mapped"), ctx.status.checkpoint
    is_reported = mapped is not None and mapped.reason == BETTER
    has_saved = saved is not None and saved.step > report.step
    # With jobs ahead in line, the room of the ended attempt would go to them.
    if is_reported and has_saved and _can_remap(ctx) and not line.jobs_ahead(ctx):
        finish.remap(ctx)


def _report_placement(ctx: ReconcileContext, placement: str) -> None:
    mapped = ctx.condition("Mapped")
    if placement:
        what = "it is taken at the next checkpoint" if _can_remap(ctx) else "suspend the job and resume it to take it"
        message = f"Another placement is better: {placement}; {what}."
        ctx.set_condition("Mapped", "True", BETTER, message)
        ctx.add_event("Normal", BETTER, message)
    elif mapped is not None and mapped.reason == BETTER:  # an earlier attempt's report is taken back
        ctx.set_condition("Mapped", "True", "Mapped", "By what steps took no other placement is much better.")


def _can_remap(ctx: ReconcileContext) -> bool:
    """Whether the job may still end an attempt for a better placement, which it does once at most."""
    is_enabled = ctx.job is not None and ctx.job.spec.placement.remap == "AtCheckpoint"
    return is_enabled and not any(each.outcome == "Remapped" for each in ctx.status.attempts)


def _has_succeeded(ctx: ReconcileContext) -> bool:
    """Whether the trainer or Ray reports success, and the trainer's last status was read or can no longer be read."""
    beat, rayjob = ctx.snapshot.current_heartbeat(), ctx.snapshot.current_rayjob()
    has_last_words = beat is not None and beat.status.phase == "Succeeded"
    if beat is not None and beat.complete and beat.exit_code == 0 and has_last_words:
        return True
    if rayjob is None or rayjob.job_status != "SUCCEEDED":
        return False
    can_answer = observed_attempt.head_can_answer(ctx.snapshot)
    return has_last_words or not can_answer or _has_waited(ctx, failure.LAST_STATUS_SECONDS)


def _has_waited(ctx: ReconcileContext, seconds: float) -> bool:
    """Whether the attempt has been over for `seconds`; the first call records its end."""
    if ctx.record is None or seconds <= 0:
        return True
    if ctx.record.end_time is None:
        ctx.set_record(end_time=timestamp(ctx.now))
        ctx.requeue_after(seconds)
        return False
    end = parsed(ctx.record.end_time)
    if end is None or (end - ctx.now).total_seconds() > CLOCK_SECONDS:
        return True
    return not ctx.must_wait(seconds - ctx.age(end))


def _failure(ctx: ReconcileContext, *, has_advanced: bool) -> Failure | None:
    if (rayjob := ctx.snapshot.current_rayjob()) and rayjob.job_status == "SUCCEEDED":
        return None  # waits for the last heartbeat
    found = failure.classify(ctx.snapshot, ctx.now, ready_since=ctx.condition_since("ClusterReady"))
    return found or _starts_too_slowly(ctx) or _hangs(ctx, has_advanced=has_advanced)


def _waiting_pods(ctx: ReconcileContext) -> list[ObservedPod]:
    """Return the pods of the current attempt for which no node has room."""
    pods = observed_attempt.current_pods(ctx.snapshot)
    return [each for each in pods if each.unschedulable and not UNRELATED_TO_ROOM.search(each.unschedulable)]


def _lacks_quota(ctx: ReconcileContext) -> str:
    """Return a clause if a full quota has kept pods of the attempt from being made for too long; else empty."""
    rayjob = ctx.snapshot.current_rayjob()
    if rayjob is None or evidence.QUOTA not in rayjob.refused or ctx.condition_since("ClusterReady"):
        return ""
    waited = ctx.age(_latest(ctx, rayjob.created, rayjob.started, ctx.condition_since("QuotaReserved")))
    if ctx.must_wait(UNSCHEDULABLE_SECONDS - waited):
        return ""
    return f"for {UNSCHEDULABLE_SECONDS:.0f} s a quota had no room for all of its pods: {rayjob.refused}"


def _is_pushed_out(ctx: ReconcileContext) -> str:
    """Return why an attempt must give its room back, because a pod has had no node for too long; else empty.

    Where node groups are to add nodes, the pods wait as long as these groups may take. Kueue does not name the group of
    an attempt: its pods wait as long as any group may take, also groups that the settings do not name.
    """
    is_queued = ctx.snapshot.in_queue(ctx.snapshot.job)
    pods = _waiting_pods(ctx) if ctx.snapshot.in_line or is_queued else []
    if not pods:
        return ""
    waited = max(ctx.age(_latest(ctx, each.created)) for each in pods)
    groups = sorted({names.group_of(each) for each in ctx.coming_nodes})
    awaited = ["", *(each.name for each in ctx.settings.node_groups if each.name)] if is_queued else groups
    limit = ctx.settings.seconds_to_add(awaited, UNSCHEDULABLE_SECONDS)
    if ctx.must_wait(limit - waited):
        return ""
    lacking = f"node group {' and '.join(groups)} has not added all nodes, and " * bool(groups)
    return f"for {limit:.0f} s {lacking}no node took pod {pods[0].name}: {pods[0].unschedulable}"


def _starts_too_slowly(ctx: ReconcileContext) -> Failure | None:
    if ctx.record is None or ctx.record.first_step is not None or _waiting_pods(ctx):
        return None
    if (rayjob := ctx.snapshot.current_rayjob()) and not evidence.is_taken_up(rayjob):
        return None  # without KubeRay nothing can begin
    limit = ctx.policy.startup_deadline_seconds
    if ctx.must_wait(limit - ctx.age(_began(ctx))):
        return None
    message = f"no sign of training for {limit} s, spec.runPolicy.startupDeadlineSeconds"
    cluster = ctx.condition("ClusterReady")
    if cluster is None or cluster.status == "True":
        return failure.failed(ctx.snapshot, ctx.now, "StartupTimeout", message)
    reason: Reason = next((each for each in evidence.AWAITED if each == cluster.reason), "StartupTimeout")
    return failure.failed(ctx.snapshot, ctx.now, reason, f"{message}; {cluster.message}")


def _name_deadline(ctx: ReconcileContext) -> None:
    """Add the startup deadline to the condition of an attempt whose pods wait for something that may still come."""
    ready = ctx.condition("ClusterReady")
    if ready is not None and ready.reason in (*evidence.AWAITED, conditions.SLOW_START):
        until = timestamp(_began(ctx) + timedelta(seconds=ctx.policy.startup_deadline_seconds))
        message = f"{ready.message}; the attempt waits until {until}"
        ctx.set_condition("ClusterReady", ready.status, ready.reason, message)


def _hangs(ctx: ReconcileContext, *, has_advanced: bool) -> Failure | None:
    if ctx.record is None or ctx.record.first_step is None:
        return None
    limit = _step_deadline(ctx)
    waited = 0.0 if has_advanced else _silence(ctx)
    attempt_status.set_slow(ctx, waited, limit)
    if ctx.must_wait(limit / 2 - waited) or ctx.must_wait(limit - waited):
        return None
    step = ctx.status.progress.step if ctx.status.progress else 0
    unset = "" if ctx.policy.progress_deadline_seconds else " (not set)"
    message = f"no step after step {step} for {limit} s, spec.runPolicy.progressDeadlineSeconds{unset}"
    return failure.failed(ctx.snapshot, ctx.now, "Hang", message, observed_attempt.head_of(ctx.snapshot))


def _step_deadline(ctx: ReconcileContext) -> int:
    """Return the seconds in which the next step must end.

    If the user sets no deadline, it follows from a step's seconds, plus a call's deadline for a checkpoint. The first
    two steps, the time after the last one, and jobs with turns or evaluations keep the longest deadline.
    """
    policy, job, progress = ctx.policy, ctx.job, ctx.status.progress
    predicted = ctx.status.mapping.predicted_step_seconds if ctx.status.mapping else None
    first = ctx.record.first_step or 0 if ctx.record else 0
    if policy.progress_deadline_seconds or not (job and progress and predicted):
        return policy.progress_deadline
    evaluates = job.spec.evaluation is not None and bool(job.spec.evaluation.every_steps)
    is_ordinary = first + ORDINARY <= progress.step < progress.total_steps
    if evaluates or job.spec.rollout.has_turns or not is_ordinary:
        return policy.progress_deadline
    measured = (progress.pace.step_seconds if progress.pace else 0.0, progress.step_seconds or 0.0)
    by_step = deadline_by(max(predicted, *measured), STEP_SECONDS)
    by_step = max(by_step, job.least_call_deadline)
    return min(by_step + job.spec.training.call_deadline, policy.progress_deadline)


def _began(ctx: ReconcileContext) -> datetime:
    """Return when the attempt could begin: quota reserved, RayJob started, and the last pod scheduled."""
    rayjob, recorded = ctx.snapshot.current_rayjob(), parsed(ctx.record.start_time) if ctx.record else None
    moments = (recorded, ctx.condition_since("QuotaReserved"), rayjob.started if rayjob else None)
    return _latest(ctx, *moments, *(pod.scheduled for pod in observed_attempt.current_pods(ctx.snapshot)))


def _silence(ctx: ReconcileContext) -> float:
    """Return the seconds since the last step; before the first step, since the trainer's first report."""
    if ctx.status.progress and (stepped := parsed(ctx.status.progress.last_step_time)):
        return ctx.age(_latest(ctx, stepped))
    training = ctx.condition("Training")
    first_word = _latest(ctx, parsed(training.last_transition_time) if training else None)
    # If Training was Unknown meanwhile, the transition is newer than the report, which came by the startup deadline.
    return max(ctx.age(first_word), ctx.age(_began(ctx)) - ctx.policy.startup_deadline_seconds)


def _latest(ctx: ReconcileContext, *moments: datetime | None) -> datetime:
    """Return the latest of some moments, but not before the operator began to watch."""
    return max([ctx.snapshot.watching_since, *(each for each in moments if each)])
