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
from rlhf_operator.reconcile.forecast import Forecast, pods_of, remaining_seconds
from rlhf_operator.reconcile.room import Group, Room, place
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
    return any(is_guest(each) and ctx.turns.of(each) <= own for each in (*ctx.snapshot.holders, job))


def delays_nobody(ctx: ReconcileContext, mapping: MappedPlacement, room: Room, ahead: Sequence[ObservedJob]) -> bool:
    """Whether an attempt in this room would delay none of the jobs ahead that may begin next.

    It ends before such a job could begin, or the job could not use the room. A job ahead without a mapping is delayed.
    """
    own = replace(ctx.snapshot.job, status=ctx.status.model_copy(update={"mapping": mapping, "reserved": ()}))
    end = remaining_seconds(own, ctx.now) + START_AND_END_SECONDS
    for each in ctx.turns.first(ahead):
        if not (pods := pods_of(ctx, each)):
            return False
        without = Forecast.of(ctx, nodes_for(ctx, pods))
        beside = without.beside(own, room.reserved)
        start, _ = without.start_of(pods)
        if (end == math.inf or end > start) and beside.room_at(start, pods).lacks:
            return False
    return True


def nodes_for(ctx: ReconcileContext, pods: Sequence[Group]) -> Snapshot:
    """Return the snapshot with the existing nodes only, if an attempt has room there once all other jobs have ended."""
    existing = ctx.snapshot.existing()
    return ctx.snapshot if place(pods, existing.taken_only_by(())).lacks else existing


def is_open(job: ObservedJob) -> bool:
    """Whether a job has an attempt that holds room and has not ended."""
    last = job.status.attempts[-1] if job.status.attempts else None
    return last is not None and last.outcome in ("Starting", "Running") and bool(job.status.reserved)


def is_guest(job: ObservedJob) -> bool:
    """Whether a job runs an attempt that began before its turn."""
    return is_open(job) and job.status.attempts[-1].backfilled
