"""The end of an attempt, and of the job."""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Final, Literal

from rlhf_api.status import Failure, Output
from rlhf_operator import conditions, resources
from rlhf_operator.failure import action_on
from rlhf_operator.plan import DeleteJob
from rlhf_operator.reconcile import cleanup, sight
from rlhf_operator.reconcile.turn import Turn
from rlhf_operator.times import parsed, timestamp

UNQUEUED: Final = frozenset({sight.NOT_QUEUED[0], sight.IGNORED[0]})
"""Reasons of QuotaReserved=True for which Kueue has given nothing."""
LONGEST_PAUSE: Final = 300.0
"""Seconds between two attempts, at most."""


def tidy(turn: Turn) -> None:
    """A job that has ended: nothing may be left running, and after its time to live the job goes too."""
    is_clear = cleanup.clear(turn)
    ended, ttl = parsed(turn.status.completion_time), turn.policy.ttl_seconds_after_finished
    if not is_clear or ended is None or ttl is None:
        return
    rest = ttl - turn.age(ended)
    if rest > 0:
        turn.again(rest)
        return
    turn.need_live("the job's time to live is over")
    turn.actions.append(DeleteJob(uid=turn.snapshot.job.uid))


def succeed(turn: Turn) -> None:
    """The trainer has finished: say so, then free what it ran on."""
    turn.need_live("the job has succeeded")
    name, beat = turn.snapshot.job.name, turn.snapshot.heartbeat
    _end_attempt(turn, "Succeeded")
    output = Output(uri=resources.output_uri(turn.job)) if turn.job else (beat.status.output if beat else None)
    turn.set(output=output, completion_time=timestamp(turn.now), next_attempt_time=None)
    turn.say("Training", "False", "Finished", "Training has finished.")
    turn.say(
        "Complete", "True", "JobComplete", f"{name} has finished; its model is at {output.uri if output else '?'}."
    )
    cleanup.delete_rayjobs(turn, but=None)


def fail(turn: Turn, reason: str, message: str) -> None:
    """The job has failed, for good."""
    turn.need_live(f"the job fails: {reason}")
    if turn.record is not None and turn.record.outcome == "Running":
        _end_attempt(turn, "Failed")
        turn.set_record(message=conditions.shortened(message))
    turn.set(completion_time=timestamp(turn.now), next_attempt_time=None)
    turn.say("Training", "False", "Finished", "No attempt is running.")
    turn.say("Failed", "True", reason, message)
    cleanup.delete_rayjobs(turn, but=None)


def fail_attempt(turn: Turn, failure: Failure) -> None:
    """An attempt has failed: what follows is for the job's rules to say, then for its reason."""
    turn.need_live(f"attempt {turn.status.attempt} has failed: {failure.reason}")
    action, rule = action_on(failure, turn.policy)
    is_counted = action != "Ignore"
    count = (turn.status.failed_attempts or 0) + is_counted
    number = turn.status.attempt
    what = f"Attempt {number} failed ({failure.reason}): {failure.message}"
    _end_attempt(turn, "Failed")
    turn.set_record(
        counted=is_counted, reason=failure.reason, message=failure.message, pod=failure.pod, node=failure.node
    )
    turn.set(last_failure=failure.model_copy(update={"rule": rule}), failed_attempts=count)
    turn.tell("Warning", failure.reason, what)
    if action == "Fail":
        fail(turn, "FailureRule" if rule else failure.reason, what)
    elif is_counted and count > turn.policy.backoff_limit:
        fail(turn, "BackoffLimitExceeded", f"{count} attempts failed, {turn.policy.backoff_limit} may. {what}")
    else:
        turn.say("Training", "False", conditions.RESTARTING, what)
        turn.set(next_attempt_time=timestamp(turn.now + timedelta(seconds=_pause(turn))))
        if action == "Remap" or failure.reason == "NodeLost":
            turn.set(mapping=None)
        cleanup.delete_rayjobs(turn, but=None)
        turn.again(_pause(turn))


def suspend(turn: Turn) -> None:
    """An attempt ends because the user wants it: its pods save a checkpoint when they are told to end."""
    turn.need_live("the job is suspended")
    _end_attempt(turn, "Suspended")
    turn.set(next_attempt_time=None)
    turn.say("Training", "False", "Suspended", "No attempt is running.")
    turn.say("Suspended", "False", conditions.SUSPENDING, "The job saves a checkpoint and frees its slots.")
    cleanup.delete_rayjobs(turn, but=None)


def active_seconds(turn: Turn) -> float:
    """How long the current attempt has had its slots; time in a queue does not count."""
    if turn.record is None or not conditions.holds(turn.status.conditions, "QuotaReserved"):
        return 0.0
    began, reserved = parsed(turn.record.start_time), turn.became("QuotaReserved")
    return min((turn.age(each) for each in (began, reserved) if each), default=0.0)


def _end_attempt(turn: Turn, outcome: Literal["Succeeded", "Failed", "Suspended"]) -> None:
    turn.set(active_seconds=(turn.status.active_seconds or 0) + int(active_seconds(turn)))
    record, progress = turn.record, turn.status.progress
    has_trained = record is not None and record.first_step is not None
    turn.set_record(
        outcome=outcome, end_time=timestamp(turn.now), last_step=progress.step if progress and has_trained else None
    )
    turn.say("ClusterReady", "False", "Ended", f"The cluster of attempt {turn.status.attempt} is taken down.")
    if conditions.found(turn.status.conditions, "Stalled") is not None:
        turn.say("Stalled", "False", "Ended", f"Attempt {turn.status.attempt} has ended.")
    reserved = conditions.found(turn.status.conditions, "QuotaReserved")
    if reserved is not None and reserved.reason not in UNQUEUED:
        turn.say(
            "QuotaReserved", "False", "Ended", "No attempt is running; its quota goes back when its pods are gone."
        )


def _pause(turn: Turn) -> float:
    """Seconds before the next attempt: twice as long each time, and not the same for two jobs that fail together."""
    failures = sum(each.outcome == "Failed" for each in turn.status.attempts)
    pause = turn.policy.restart_backoff_seconds * 2.0 ** max(failures - 1, 0)
    seed = f"{turn.snapshot.job.uid}/{turn.status.attempt}"
    return min(pause * (1 + zlib.crc32(seed.encode()) % 1000 / 5000), LONGEST_PAUSE)
