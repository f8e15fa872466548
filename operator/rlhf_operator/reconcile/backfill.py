"""Backfill: a job begins before its turn where no job ahead is delayed. Such a job is called a guest.

Predictions are wrong, so the jobs ahead do not rely on them. As soon as a job ahead could begin on the room of guests,
the guests save a checkpoint and end.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rlhf_api.status import MappedPlacement
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.reconcile.forecast import Forecast, manifest_of, remaining_seconds
from rlhf_operator.reconcile.room import Group, Room, groups_of, place
from rlhf_operator.snapshot import ObservedJob, Snapshot

MAX_YIELDED: Final = 3
"""Attempts of a job that may give their room back; after that the job begins in its turn only."""
START_AND_END_SECONDS: Final = 300.0
"""Seconds by which a job must end before a job ahead could begin: its pods take time to start and to end."""


def may_be_guest(ctx: ReconcileContext) -> bool:
    """Whether the job may begin before its turn; one that had to give its room back several times may not."""
    return sum(each.outcome == "Yielded" for each in ctx.status.attempts) < MAX_YIELDED


def has_guests_ahead(ctx: ReconcileContext) -> bool:
    """Whether a guest is ahead, or this job holds room as a guest; the guest may be back in line before this job."""
    job, own = ctx.snapshot.job, ctx.turns.of(ctx.snapshot.job)
    return any(_is_guest(each) and ctx.turns.of(each) <= own for each in (*ctx.snapshot.holders, job))


def delays_nobody(ctx: ReconcileContext, mapping: MappedPlacement, room: Room, ahead: Sequence[ObservedJob]) -> bool:
    """Whether an attempt in this room would delay none of the jobs ahead that may begin next.

    It ends before such a job could begin, or the job could not use the room. A job ahead without a mapping is delayed.
    """
    own = replace(ctx.snapshot.job, status=ctx.status.model_copy(update={"mapping": mapping, "reserved": ()}))
    end = remaining_seconds(own, ctx.now) + START_AND_END_SECONDS
    for each in ctx.turns.first(ahead):
        if (attempt := manifest_of(ctx, each)) is None:
            return False
        pods = groups_of(attempt)
        without = Forecast.of(ctx, _nodes_for(ctx, pods))
        beside = without.beside(own, room.reserved)
        start, _ = without.start_of(pods)
        if (end == math.inf or end > start) and beside.room_at(start, pods).lacks:
            return False
    return True


def needs_room(ctx: ReconcileContext, ahead: Sequence[ObservedJob]) -> ObservedJob | None:
    """Return a job ahead that could begin if the running attempt gave its room back; None if the attempt goes on."""
    if not (ctx.snapshot.in_line and ahead and _is_guest(own := replace(ctx.snapshot.job, status=ctx.status))):
        return None
    holders = (*ctx.snapshot.holders, own)
    # Those that began last give their room back first.
    guests = sorted(filter(_is_guest, holders), key=lambda each: (each.status.attempts[-1].start_time, each.uid))
    for each in ctx.turns.first(ahead):
        attempt, behind = manifest_of(ctx, each), [guest for guest in guests[::-1] if _is_behind(ctx, guest, each)]
        if attempt and own in _leaving(ctx, groups_of(attempt), holders, behind) and _can_save(ctx):
            return each
    return None


def will_leave_room(ctx: ReconcileContext, pods: Sequence[Group]) -> bool:
    """Whether guests behind the job hold room on existing nodes without which an attempt's pods have too little."""
    job = replace(ctx.snapshot.job, status=ctx.status)
    left = [each for each in ctx.snapshot.holders if not (_is_guest(each) and _is_behind(ctx, each, job))]
    has_guests = len(left) < len(ctx.snapshot.holders)
    return has_guests and not place(pods, ctx.snapshot.existing().taken_only_by(left)).lacks


def _is_behind(ctx: ReconcileContext, job: ObservedJob, ahead: ObservedJob) -> bool:
    return ctx.turns.of(ahead) < ctx.turns.of(job)


def _nodes_for(ctx: ReconcileContext, pods: Sequence[Group]) -> Snapshot:
    """Return the snapshot with the existing nodes only, if an attempt has room there once all other jobs have ended."""
    existing = ctx.snapshot.existing()
    return ctx.snapshot if place(pods, existing.taken_only_by(())).lacks else existing


def _is_guest(job: ObservedJob) -> bool:
    """Whether a job runs an attempt that began before its turn."""
    last = job.status.attempts[-1] if job.status.attempts else None
    is_open = last is not None and last.backfilled and last.outcome in ("Starting", "Running")
    return is_open and bool(job.status.reserved)


def _leaving(
    ctx: ReconcileContext, pods: Sequence[Group], holders: Sequence[ObservedJob], guests: Sequence[ObservedJob]
) -> list[ObservedJob]:
    """Return the guests whose room an attempt's pods need, the first guests before others; none if it is too little."""

    nodes = _nodes_for(ctx, pods)

    def has_room_without(leaving: Sequence[ObservedJob]) -> bool:
        left = [each for each in holders if each not in leaving]
        return not place(pods, nodes.taken_only_by(left)).lacks

    for count in range(len(guests) + 1):
        leaving = list(guests[:count])
        if has_room_without(leaving):
            return [each for each in leaving if not has_room_without([other for other in leaving if other is not each])]
    return []


def _can_save(ctx: ReconcileContext) -> bool:
    """Whether an attempt that ends now loses little: its pods save a checkpoint in the grace period, or have just done.

    Longer steps end with the next checkpoint that the trainer makes anyway.
    """
    progress, saved = ctx.status.progress, ctx.status.checkpoint
    if progress is None or ctx.record is None or ctx.record.first_step is None:
        return True
    is_saved = saved is not None and saved.step >= progress.step - 1  # it is known to be whole a step later
    return is_saved or (progress.step_seconds or 0.0) <= ctx.settings.grace_period_seconds / 2
