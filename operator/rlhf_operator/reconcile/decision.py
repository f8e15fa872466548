"""The order in which a job is looked at."""

from __future__ import annotations

from datetime import datetime

from rlhf_operator.plan import Plan, ReadLive
from rlhf_operator.reconcile import between, ended, watch
from rlhf_operator.reconcile.turn import NeedsLiveError, Turn
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot


def decide(snapshot: Snapshot, now: datetime, settings: Settings) -> Plan:
    """The status to write and what to do then; the same for the same arguments, and nothing to do the second time."""
    if snapshot.job.deleting:
        return Plan(status=snapshot.job.status)  # the owner references do the rest
    turn = Turn.of(snapshot, now, settings)
    try:
        if turn.has_ended:
            ended.tidy(turn)
        elif turn.is_under_way:
            watch.look(turn)
        else:
            between.advance(turn)
    except NeedsLiveError as needed:
        return Plan(status=snapshot.job.status, actions=(ReadLive(why=str(needed)),))
    return turn.plan()
