"""What the operator has promised about every status that it writes."""

from __future__ import annotations

from typing import get_args

from rlhf_api.status import Attempt, Readiness, Status


class InvariantError(AssertionError):
    """The operator did what it never may."""


def check(is_so: bool, what: str) -> None:
    """An invariant."""
    if not is_so:
        raise InvariantError(what)


def _kept(attempt: Attempt) -> Attempt:
    """A record without what its pods may still tell while they end."""
    return attempt.model_copy(update={"last_step": None})


def result(status: Status) -> Status:
    """A finished job's status without what an edit, or an upgrade of the operator, may still change."""
    kept = tuple(each for each in status.conditions if each.type not in get_args(Readiness))
    return status.model_copy(update={"observed_generation": None, "conditions": kept})


def check_step(before: Status, after: Status, generation: int) -> None:
    """What holds of any two statuses that follow each other."""
    if before.phase in ("Succeeded", "Failed"):
        check(result(after) == result(before), "a finished job stays as it is")
    check((after.attempt or 0) >= (before.attempt or 0), "the attempt never decreases")
    if before != Status():  # it was not lost
        check((after.attempt or 0) <= (before.attempt or 0) + 1, "attempts are numbered without gaps")
    check((after.failed_attempts or 0) >= (before.failed_attempts or 0), "failures are not forgotten")
    check((after.active_seconds or 0) >= (before.active_seconds or 0), "time does not run back")
    check((after.observed_generation or 0) <= generation, "observedGeneration is not ahead")
    check(len({each.type for each in after.conditions}) == len(after.conditions), "one condition a type")
    numbers = [each.attempt for each in after.attempts]
    check(numbers == sorted(set(numbers)), "attempts are listed in order, once")
    running = [each.attempt for each in after.attempts if each.outcome in ("Starting", "Running")]
    check(running in ([], [after.attempt]), "only the current attempt runs")
    check(sum(each.outcome == "Remapped" for each in after.attempts) <= 1, "a better placement is taken once")
    ended = {each.attempt: _kept(each) for each in before.attempts if each.outcome not in ("Starting", "Running")}
    is_kept = (_kept(each) == ended.get(each.attempt, _kept(each)) for each in after.attempts)
    check(all(is_kept), "history is not rewritten")
    if len(after.attempts) == (after.attempt or 0):
        counted = sum(each.counted for each in after.attempts)
        check(counted == (after.failed_attempts or 0), "failedAttempts counts the counted")
    for each in after.conditions:
        old = next((one for one in before.conditions if one.type == each.type), None)
        if old is not None and old.status == each.status:
            check(old.last_transition_time == each.last_transition_time, f"{each.type} has not changed its status")
    if before.attempt == after.attempt and before.progress and before.attempts and after.attempts:
        is_same = before.attempts[-1].first_step is not None
        check(not is_same or (after.progress or before.progress).step >= before.progress.step, "steps do not run back")
