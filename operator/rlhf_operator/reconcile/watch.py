"""An attempt that is under way: how far it is, whether it has ended, and whether it has to be ended."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from rlhf_api.status import Failure
from rlhf_operator import conditions, failure
from rlhf_operator.reconcile import cleanup, ended, sight
from rlhf_operator.reconcile.turn import Turn
from rlhf_operator.times import parsed, timestamp

CLOCK_SECONDS: Final = 2.0
"""By so much a time in the status may lie ahead: it is written in whole seconds."""


def look(turn: Turn) -> None:
    """Bring the status up to date with the attempt, and end what is over."""
    rayjob = turn.snapshot.current_rayjob()
    cleanup.delete_rayjobs(turn, but=rayjob.name if rayjob else None)
    sight.begin(turn)
    has_advanced = sight.hear(turn)
    if _has_succeeded(turn):
        ended.succeed(turn)
    elif turn.snapshot.job.spec.get("suspend") is True:
        ended.suspend(turn)
    elif sight.is_queued(turn):
        sight.queue(turn)
    else:
        sight.reserve(turn)
        _go_on(turn, has_advanced=has_advanced)


def _go_on(turn: Turn, *, has_advanced: bool) -> None:
    found = _failure(turn, has_advanced=has_advanced)
    if found is None:
        sight.run(turn)
        _mind_the_deadline(turn)
    elif _has_waited(turn, failure.patience(found, turn.snapshot)):
        ended.fail_attempt(turn, found)


def _has_succeeded(turn: Turn) -> bool:
    """Whether the trainer or Ray says that the job is done, and the trainer's last status was read, if it can be."""
    beat, rayjob = sight.heartbeat(turn), turn.snapshot.current_rayjob()
    has_last_words = beat is not None and beat.status.phase == "Succeeded"
    if beat is not None and beat.complete and beat.exit_code == 0 and has_last_words:
        return True
    if rayjob is None or rayjob.job_status != "SUCCEEDED":
        return False
    head = failure.head_of(turn.snapshot)
    can_speak = head is not None and head.deleting_since is None and head.phase == "Running"
    return has_last_words or not can_speak or _has_waited(turn, failure.LAST_WORDS_SECONDS)


def _has_waited(turn: Turn, seconds: float) -> bool:
    """Whether the attempt has been over for so long; the first time it is asked notes the end."""
    if turn.record is None or seconds <= 0:
        return True
    if turn.record.end_time is None:
        turn.set_record(end_time=timestamp(turn.now))
        turn.again(seconds)
        return False
    end = parsed(turn.record.end_time)
    if end is None or (end - turn.now).total_seconds() > CLOCK_SECONDS or turn.age(end) >= seconds:
        return True
    turn.again(seconds - turn.age(end))
    return False


def _failure(turn: Turn, *, has_advanced: bool) -> Failure | None:
    rayjob = turn.snapshot.current_rayjob()
    if rayjob is not None and rayjob.job_status == "SUCCEEDED":
        return None  # its last words are waited for
    found = failure.classify(turn.snapshot, turn.now, ready_since=turn.became("ClusterReady"))
    return found or _starts_too_slowly(turn) or _hangs(turn, has_advanced=has_advanced)


def _starts_too_slowly(turn: Turn) -> Failure | None:
    if turn.record is None or turn.record.first_step is not None:
        return None
    limit = turn.policy.startup_deadline_seconds
    waited = turn.age(_began(turn))
    if waited < limit:
        turn.again(limit - waited)
        return None
    message = f"no sign of training for {limit} s, spec.runPolicy.startupDeadlineSeconds"
    cluster = conditions.found(turn.status.conditions, "ClusterReady")
    if cluster is not None and cluster.status != "True" and cluster.message:
        message = f"{message}; {cluster.message}"
    return failure.failed(turn.snapshot, turn.now, "StartupTimeout", message)


def _hangs(turn: Turn, *, has_advanced: bool) -> Failure | None:
    if turn.record is None or turn.record.first_step is None:
        return None
    limit = turn.policy.progress_deadline_seconds
    waited = 0.0 if has_advanced else _silence(turn)
    sight.stalled(turn, waited, limit)
    if waited < limit:
        turn.again(limit - waited if waited >= limit / 2 else limit / 2 - waited)
        return None
    step = turn.status.progress.step if turn.status.progress else 0
    message = f"no step after step {step} for {limit} s, spec.runPolicy.progressDeadlineSeconds"
    return failure.failed(turn.snapshot, turn.now, "Hang", message, failure.head_of(turn.snapshot))


def _began(turn: Turn) -> datetime:
    """When the attempt could begin."""
    return _latest(turn, parsed(turn.record.start_time) if turn.record else None, turn.became("QuotaReserved"))


def _silence(turn: Turn) -> float:
    """Seconds since the last step, or before the first one since the trainer's first word."""
    if turn.status.progress and (stepped := parsed(turn.status.progress.last_step_time)):
        return turn.age(_latest(turn, stepped))
    training = conditions.found(turn.status.conditions, "Training")
    said = _latest(turn, parsed(training.last_transition_time) if training else None)
    # Whenever Training was Unknown it begins anew, but the first word had a deadline.
    return max(turn.age(said), turn.age(_began(turn)) - turn.policy.startup_deadline_seconds)


def _latest(turn: Turn, *moments: datetime | None) -> datetime:
    """When a silence began; before the operator was there it proves nothing."""
    return max([turn.snapshot.watching_since, *(each for each in moments if each)])


def _mind_the_deadline(turn: Turn) -> None:
    deadline = turn.policy.active_deadline_seconds
    if deadline is None:
        return
    rest = deadline - (turn.status.active_seconds or 0) - ended.active_seconds(turn)
    if rest > 0:
        turn.again(rest)
        return
    message = f"all attempts together took {deadline} s, spec.runPolicy.activeDeadlineSeconds"
    ended.fail(turn, "DeadlineExceeded", message)
