"""Room that running jobs give to a job in line: guests give all of theirs, other jobs a part.

A guest is a job that has begun before its turn, as it delays no job ahead (backfill). Predictions may be wrong, so jobs
ahead do not rely on them: as soon as one could begin in the room of guests, the guests save a checkpoint and end.

A job on more nodes than `resources.nodes` goes on with fewer if a job of higher priority can then begin. No other job
is preempted.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Final, NamedTuple

from rlhf_api.status import MappedPlacement, Reserved, Status
from rlhf_operator import failure
from rlhf_operator.placement.capacity import counted
from rlhf_operator.placement.map_job import map_job
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.reconcile.forecast import Forecast, context_of, pods_of, remaining_seconds
from rlhf_operator.reconcile.room import Group, Room, groups_of, place
from rlhf_operator.snapshot import ObservedJob, Snapshot

MAX_YIELDED: Final = 3
"""Number of times that a job may begin before its turn and give its room back; later it begins in its turn only."""
START_AND_END_SECONDS: Final = 300.0
"""Seconds by which a job must end before a job ahead could begin: its pods take time to start and to end."""
MAX_SHRINKING: Final = 4
"""Most jobs that shrink for one job in line, and most jobs served at once; each is mapped anew in each trial."""


class GivenRoom(NamedTuple):
    """Room that a running job gives to jobs in line."""

    to: Sequence[ObservedJob]
    """Jobs that can then begin, in the order of their turns."""
    giver: ObservedJob
    """The running job with the mapping and room that it keeps; without room it gives all, and waits in line again."""


def may_be_guest(ctx: ReconcileContext) -> bool:
    """Whether the job may begin before its turn; one that had to give its room back several times may not."""
    return sum(each.outcome == "Yielded" for each in ctx.status.attempts) < MAX_YIELDED


def has_guests_ahead(ctx: ReconcileContext) -> bool:
    """Whether a guest is ahead, which may return to the line before this job, or this job is a guest itself."""
    job, own = ctx.snapshot.job, ctx.turns.of(ctx.snapshot.job)
    return any(is_guest(each) and ctx.turns.of(each) <= own for each in (*ctx.snapshot.holders, job))


def delays_nobody(ctx: ReconcileContext, mapping: MappedPlacement, room: Room, ahead: Sequence[ObservedJob]) -> bool:
    """Whether an attempt in this room would delay none of the jobs ahead that may begin next.

    Each of them must begin after the attempt's end, or have room beside it. A job without a mapping counts as delayed.
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


def find_room_to_give(ctx: ReconcileContext, waiting: Sequence[ObservedJob]) -> GivenRoom | None:
    """Return what the running attempt gives to jobs in line that could then begin; None if it goes on as it is.

    Jobs that wait behind the first one are served, too, as long as the same jobs give.
    """
    own = replace(ctx.snapshot.job, status=ctx.status)
    may_give = is_open(own) and (is_guest(own) or bool(_spare_nodes(ctx, own)))
    if not (ctx.snapshot.in_line and may_give and _can_save(ctx)):
        return None
    return next(filter(None, (_gift(ctx, own, first, waiting) for first in ctx.turns.first(waiting))), None)


def _gift(
    ctx: ReconcileContext, own: ObservedJob, first: ObservedJob, waiting: Sequence[ObservedJob]
) -> GivenRoom | None:
    """Return what a running job gives to a job in line and some behind it; None if the first needs none of it."""
    found, pods, others = None, list[Group](), None
    behind = sorted((each for each in waiting if ctx.turns.of(first) < ctx.turns.of(each)), key=ctx.turns.of)
    served = (first, *behind[: MAX_SHRINKING - 1])
    for count, each in enumerate(served, start=1):
        if not (more := fewest_pods(ctx, each)):
            break
        pods += more
        givers = {giver.uid: giver for giver in find_givers(ctx, each, pods, (*ctx.snapshot.holders, own))}
        if own.uid not in givers or others not in (None, givers.keys()):
            break
        found, others = GivenRoom(to=served[:count], giver=givers[own.uid]), givers.keys()
    return found


def find_nodes_to_take_back(ctx: ReconcileContext, waiting: Sequence[ObservedJob]) -> ObservedJob | None:
    """Return the job with more nodes, up to as many as it had before it gave some away; None if it keeps its size.

    It keeps its size while a job in line, or soon to be there again, may use these nodes, before this attempt's first
    checkpoint, and shortly before its end.
    """
    own, mapping, saved = replace(ctx.snapshot.job, status=ctx.status), ctx.status.mapping, ctx.status.checkpoint
    most = max((each.slots for each in ctx.status.attempts if each.outcome == "Resized"), default=0)
    if not (ctx.snapshot.in_line and mapping and mapping.slots < most and saved and ctx.record):
        return None
    has_saved = ctx.record.first_step is not None and saved.step > ctx.record.first_step
    is_worthwhile = remaining_seconds(own, ctx.now) > START_AND_END_SECONDS
    usable = ctx.turns.demand(replace(own, status=Status()).node_request).nodes
    if not usable.isdisjoint(nodes_for_waiting(ctx, waiting)) or not (has_saved and is_worthwhile and _can_save(ctx)):
        return None
    sizes = range(mapping.nodes + 1, most * mapping.nodes // mapping.slots + 1)
    return with_largest_mapping(ctx, own, ctx.snapshot, sizes)


def nodes_for_waiting(ctx: ReconcileContext, waiting: Sequence[ObservedJob]) -> frozenset[str]:
    """Return the names of the nodes that jobs in line, or soon to be there again, may use."""
    jobs = (*waiting, *(each for each in ctx.snapshot.pausing if not ctx.snapshot.in_queue(each)))
    return frozenset[str]().union(*(ctx.turns.demand(each.node_request).nodes for each in jobs))


def givers_in_words(ctx: ReconcileContext) -> str:
    """Return a clause that says which jobs give room to this one; empty if none does."""
    own, before = replace(ctx.snapshot.job, status=ctx.status), {each.uid: each for each in ctx.snapshot.holders}
    words = []
    for each in find_givers(ctx, own, fewest_pods(ctx, own), ctx.snapshot.holders):
        was, now = before[each.uid].status.mapping, each.status.mapping
        rest = f" and goes on with {now.nodes} of its {counted(was.nodes, 'node')}" if was and now else ""
        words.append(f"{each.namespace}/{each.name} makes room at its next checkpoint{rest}")
    return " and ".join(words)


def find_givers(
    ctx: ReconcileContext, to: ObservedJob, pods: Sequence[Group], holders: Sequence[ObservedJob]
) -> list[ObservedJob]:
    """Return the jobs that give room for pods, with the room that they keep; [] if none must, or all give too little.

    As few jobs give as suffice, in the order of `_possible_givers`, after elastic pools have given their extra nodes.
    """
    trial = _Trial(ctx, to, pods, [each.without_extras() for each in holders], nodes_for(ctx, pods))
    givers = _possible_givers(ctx, to, pods, trial.holders) if pods else []
    trials = (givers[:count] for count in range(len(givers) + 1))
    needed = next((some for some in trials if trial.kept(some) is not None), [])
    for each in needed[:-1]:  # the givers after it may suffice
        fewer = [other for other in needed if other is not each]
        needed = needed if trial.kept(fewer) is None else fewer
    return trial.kept(needed) or []


class _Trial(NamedTuple):
    """Search for the jobs that give room for the pods of a job in line."""

    ctx: ReconcileContext
    to: ObservedJob
    pods: Sequence[Group]
    holders: Sequence[ObservedJob]
    nodes: Snapshot

    def kept(self, some: Sequence[ObservedJob]) -> list[ObservedJob] | None:
        """Return these givers with what they keep; None if the pods then have too little room."""
        holding = [each for each in self.holders if each not in some]
        room = place(self.pods, self.nodes.taken_only_by(holding))
        if room.lacks:
            return None
        holding.append(_holding(self.to, self.to.status.mapping, room.reserved))
        for each in some:
            rest = self._rest(each, holding, [other for other in some if other is not each], is_last=each is some[-1])
            if rest is None:
                return None
            holding.append(rest)
        return holding[len(holding) - len(some) :]

    def _rest(
        self, job: ObservedJob, holding: Sequence[ObservedJob], others: Sequence[ObservedJob], *, is_last: bool
    ) -> ObservedJob | None:
        """Return a giver with the room that it keeps beside `holding`, if possible also beside the room of `others`."""
        if is_guest(job):
            return _holding(job, None, ())
        sizes = _spare_nodes(self.ctx, job)[: None if is_last else 1]  # all givers but the last keep the smallest size
        seen = (self.nodes.taken_only_by([*holding, *more]) for more in ([others, []] if others else [[]]))
        return next(filter(None, (with_largest_mapping(self.ctx, job, on, sizes) for on in seen)), None)


def with_largest_mapping(ctx: ReconcileContext, job: ObservedJob, seen: Snapshot, sizes: range) -> ObservedJob | None:
    """Return a job with the largest mapping on one of these numbers of nodes that has room, and with this room."""
    other = context_of(ctx, job)
    bad = failure.bad_nodes(other.snapshot, ctx.now)
    nodes = replace(other.snapshot, nodes=seen.existing().without(bad).nodes, taken=seen.taken)
    most = sizes[-1] if other.job and sizes else 0
    while other.job and most in sizes:
        mapping = map_job(other.job, nodes, ctx.settings, most_nodes=most).mapping
        if mapping is None or mapping.nodes not in sizes:
            return None
        if not (room := place(groups_of(nodes, other.job, mapping, ctx.settings), nodes)).lacks:
            return _holding(job, mapping, room.reserved)
        most = mapping.nodes - 1
    return None


def _possible_givers(
    ctx: ReconcileContext, to: ObservedJob, pods: Sequence[Group], holders: Sequence[ObservedJob]
) -> list[ObservedJob]:
    """Return the jobs that may give room to a job in line, in the order in which they do.

    Guests come first. Jobs that may have fewer nodes follow, unless node groups can add enough. In both the lowest
    priority comes first, then the youngest job.
    """

    def last_in_turn(job: ObservedJob) -> tuple[int, float, str]:
        return ctx.turns.demand(job.node_request).priority, -job.created.timestamp(), job.uid

    found = sorted(filter(is_open, holders), key=last_in_turn)
    guests = [each for each in found if is_guest(each) and ctx.turns.of(to) < ctx.turns.of(each)]
    if not place(pods, ctx.snapshot.taken_only_by(each for each in holders if each not in guests)).lacks:
        return guests
    demand = ctx.turns.demand(to.node_request)
    shrinking = [
        each
        for each in found
        if not is_guest(each) and ctx.turns.demand(each.node_request).priority < demand.priority
        if _spare_nodes(ctx, each) and any(held.node in demand.nodes for held in each.status.reserved)
    ]
    return [*guests, *shrinking[:MAX_SHRINKING]]


def _spare_nodes(ctx: ReconcileContext, job: ObservedJob) -> range:
    """Return the smaller numbers of nodes on which a job may run."""
    parsed, mapping = context_of(ctx, job).job, job.status.mapping
    if parsed is None or mapping is None or parsed.spec.resources.max_nodes is None:
        return range(0)
    return range(parsed.spec.resources.nodes, mapping.nodes)


def fewest_pods(ctx: ReconcileContext, waiting: ObservedJob) -> list[Group]:
    """Return the pods of the smallest attempt by which a job in line may begin; none if it has no mapping yet."""
    job, mapping = context_of(ctx, waiting).job, waiting.status.mapping
    if job and mapping and mapping.device == "GPU":
        emptied, counts = ctx.snapshot.taken_only_by(()), range(job.spec.resources.nodes, mapping.nodes)
        on = cache(lambda most: with_largest_mapping(ctx, waiting, emptied, range(counts.start, most + 1)))
        found = bisect_left(counts, True, key=lambda most: on(most) is not None)
        waiting = (on(counts[found]) if found < len(counts) else None) or waiting
    return pods_of(ctx, waiting)


def _holding(job: ObservedJob, mapping: MappedPlacement | None, reserved: Sequence[Reserved]) -> ObservedJob:
    """Return a job with another mapping and other room."""
    return replace(job, status=job.status.model_copy(update={"mapping": mapping, "reserved": tuple(reserved)}))


def _can_save(ctx: ReconcileContext) -> bool:
    """Whether an attempt that ends now loses little: its pods can save a checkpoint in time, or have just saved one.

    If steps are too long to save in time, an attempt ends only after a regular checkpoint of the trainer.
    """
    progress, saved = ctx.status.progress, ctx.status.checkpoint
    if progress is None or ctx.record is None or ctx.record.first_step is None:
        return True
    is_saved = saved is not None and saved.step >= progress.step - 1  # a checkpoint counts once the next step has ended
    return is_saved or (progress.step_seconds or 0.0) <= ctx.settings.grace_period_seconds / 2
