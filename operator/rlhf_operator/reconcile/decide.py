"""Decides what to do about a job, from one snapshot. Pure: no clock, no cluster, no memory but the status.

Modules: `running` (an attempt is under way), `next_attempt` (no attempt is under way), `shapes` (what must be read
before one), `line` and `room` (whose turn it is, and whether all its pods find nodes), `finish` (the end of an attempt
and of the job). What cannot be undone is decided on live reads only, and
the status says what will be done before it is done, so that the operator may be killed at any moment.
"""

from __future__ import annotations

from datetime import datetime

from rlhf_operator.actions import Plan
from rlhf_operator.reconcile import cleanup, finish, next_attempt, running
from rlhf_operator.reconcile.context import SHORTEST_REQUEUE, NeedsLiveReadError, NotYetError, ReconcileContext
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot


def decide(snapshot: Snapshot, now: datetime, settings: Settings) -> Plan:
    """The status to write and the actions to take. A second pass over its result does nothing."""
    if snapshot.job.deleting:
        return Plan(status=snapshot.job.status)  # the owner references do the rest
    ctx = ReconcileContext.of(snapshot, now, settings)
    try:
        if ctx.has_ended:
            finish.clean_up(ctx)
        elif ctx.is_under_way:
            running.check(ctx)
        else:
            next_attempt.prepare(ctx)
        cleanup.keep_claim(ctx)
    except NeedsLiveReadError as needed:
        return Plan(status=snapshot.job.status, actions=(needed.look,))
    except NotYetError:
        return Plan(status=snapshot.job.status, requeue_after=SHORTEST_REQUEUE)
    return ctx.plan()
