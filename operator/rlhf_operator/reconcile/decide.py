"""Decision of a reconcile pass: the status to write and the actions to take, from one snapshot.

An action that cannot be undone requires live reads. The status names an action before it is done, so the operator may
be killed at any moment.
"""

from datetime import datetime

from rlhf_operator.actions import Plan
from rlhf_operator.reconcile import cleanup, finish, next_attempt, running
from rlhf_operator.reconcile.context import NeedsLiveReadError, ReconcileContext
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot


def decide(snapshot: Snapshot, now: datetime, settings: Settings) -> Plan:
    """Return the status to write and the actions to take; a second pass over the result does nothing."""
    if snapshot.job.deleting:
        return Plan(status=snapshot.job.status)  # Kubernetes deletes the objects that the job owns
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
    return ctx.plan()
