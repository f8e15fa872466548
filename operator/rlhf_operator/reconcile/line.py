"""The line of jobs that wait for room: a job begins with all its pods or not at all, if it is its turn (`turns`).

The statuses of all jobs decide a job's position in line, and the room that it holds from its turn on. A job in a
queue of Kueue is in no line. No job is in a line if the operator may not read nodes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from rlhf_api.job import Job
from rlhf_api.names import slots_text
from rlhf_api.status import MappedPlacement, Reserved, Status
from rlhf_operator import conditions, failure, names
from rlhf_operator.placement.map_job import MappingReason, MappingResult, map_job, still_fits
from rlhf_operator.reconcile import finish, forecast, giving, shapes
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.reconcile.room import Group, groups_of, place, with_head
from rlhf_operator.snapshot import ObservedJob, Snapshot
from rlhf_operator.times import parsed

RECHECK_SECONDS: Final = 60.0
"""Seconds until a waiting job is checked again: nodes and foreign pods come and go without an event about it."""
BINDING_SECONDS: Final = 30.0
"""Seconds in which KubeRay makes the pods of an attempt and the scheduler gives them nodes."""
BACKFILL_DEPTH: Final = 100
"""Most jobs ahead of a job that may begin before its turn."""
MAX_REPORTED_POSITIONS: Final = 10
"""Largest position in line that a status reports exactly, so that a job that leaves the line changes few statuses."""
FAR_BEHIND: Final = f"At least {MAX_REPORTED_POSITIONS} jobs are before it in line."


class Turn(NamedTuple):
    """Turn of a job whose next attempt begins."""

    mapping: MappedPlacement
    avoided: tuple[str, ...]
    """Nodes that the attempt keeps off."""
    is_backfilled: bool = False
    """Whether the attempt begins before jobs ahead in line."""


def reserve_room(ctx: ReconcileContext, job: Job) -> Turn | None:
    """Return the turn of the next attempt once it may begin and there is room; the current mapping is kept if it fits.

    None: a condition says what the job waits for.
    """
    older, holds_room = jobs_ahead(ctx), bool(ctx.status.reserved)
    ahead = [] if holds_room else older
    # A job that holds room goes on at once, but takes no more room before the jobs ahead.
    largest = ctx.status.mapping if holds_room and older else None
    if holds_room and ctx.outcome == "Resized" and (turn := _reserve_on(ctx, job, _own_room(ctx), largest)):
        return turn
    free = _open_nodes(ctx, ahead)
    turn = _reserve_on(ctx, job, free, largest) if free is not None else None
    if turn is None and 0 < len(ahead) <= BACKFILL_DEPTH and giving.may_be_guest(ctx):
        turn = _reserve_on(ctx, job, ctx.snapshot, largest, ahead)
    if turn is not None:
        is_guest = giving.has_guests_ahead(ctx) and giving.may_be_guest(ctx)
        return turn._replace(is_backfilled=turn.is_backfilled or is_guest)
    if ctx.snapshot.in_line and _has_shapes(ctx, job):
        _wait(ctx, job, older)
    return None


def _reserve_on(
    ctx: ReconcileContext,
    job: Job,
    free: Snapshot,
    largest: MappedPlacement | None,
    delayed: Sequence[ObservedJob] = (),
) -> Turn | None:
    """Reserve room on the free nodes with the current mapping or a new one, no larger than `largest`.

    delayed: jobs ahead in line, which the attempt must not delay.
    """
    # If there is no room without the nodes on which attempts failed, these nodes are used as well.
    for avoided in dict.fromkeys((failure.bad_nodes(ctx.snapshot, ctx.now), ())):
        seen = free.without(avoided)
        current = ctx.status.mapping
        if current and still_fits(job, current, seen, ctx.settings) and _reserves(ctx, job, current, seen, delayed):
            if ctx.outcome == "Resized" or not ctx.holds("Mapped"):
                ctx.set_condition("Mapped", "True", "Mapped", _summary(current))
            return Turn(current, avoided, is_backfilled=bool(delayed))
        if not _has_shapes(ctx, job):
            return None
        if not ctx.snapshot.in_line:
            ctx.require_live("the next attempt is mapped")
        result = map_job(job, seen, ctx.settings, most_nodes=largest.nodes if largest else None)
        mapping = result.mapping
        if mapping and (not largest or mapping.slots <= largest.slots) and _reserves(ctx, job, mapping, seen, delayed):
            _set_mapped(ctx, result)
            return Turn(mapping, avoided, is_backfilled=bool(delayed))
        if not ctx.snapshot.in_line and not avoided:
            _set_unmapped(ctx, result.reason, result.message)
    return None


def _open_nodes(ctx: ReconcileContext, ahead: list[ObservedJob]) -> Snapshot | None:
    """Return the snapshot in which the nodes that jobs ahead may use are full; None if this job can use no others."""
    if not ahead:
        return ctx.snapshot
    if any(not each.status.conditions for each in ahead):
        return None  # nobody knows yet which nodes these jobs need
    claimed = frozenset[str]().union(*(ctx.turns.demand(each).nodes for each in {job.node_request for job in ahead}))
    if ctx.turns.demand(replace(ctx.snapshot.job, status=Status()).node_request).nodes <= claimed:
        return None
    snapshot = with_head(forecast.pods_of(ctx, min(ahead, key=ctx.turns.of)), ctx.snapshot)
    full = {node.name: node.room for node in snapshot.nodes or () if node.name in claimed}
    return replace(snapshot, taken={**snapshot.taken, **full})


def _own_room(ctx: ReconcileContext) -> Snapshot:
    """Return the snapshot with all room taken, except what the job holds."""
    held = {each.node: each.amounts for each in ctx.status.reserved}
    taken = {
        node.name: Counter(ctx.snapshot.taken.get(node.name, {})) | (node.room - held.get(node.name, Counter()))
        for node in ctx.snapshot.nodes or ()
    }
    return replace(ctx.snapshot, taken=taken)


def _has_shapes(ctx: ReconcileContext, job: Job) -> bool:
    """Whether all shapes are known; if not, the mapping and the reserved room are given up while a pod reads them."""
    if ctx.has_shapes is None:
        ctx.has_shapes = shapes.are_read(ctx, job)
        if not ctx.has_shapes:
            ctx.set_status(mapping=None, reserved=())
    return ctx.has_shapes


def _reserves(
    ctx: ReconcileContext, job: Job, mapping: MappedPlacement, seen: Snapshot, delayed: Sequence[ObservedJob]
) -> bool:
    """Whether all pods of an attempt have room and delay none of these jobs; if so, the room is reserved for it."""
    if not ctx.snapshot.in_line:
        return True
    pods = groups_of(ctx.snapshot, job, mapping, ctx.settings)
    found = place(pods, seen)
    if found.lacks or (delayed and not giving.delays_nobody(ctx, mapping, found, delayed)):
        return False
    if _awaits_nodes(found.reserved) and _should_wait_for_existing_nodes(ctx, pods):
        return False
    ctx.require_live("room is reserved", alone=True)
    ctx.set_status(reserved=found.reserved)
    return True


def _should_wait_for_existing_nodes(ctx: ReconcileContext, pods: Sequence[Group]) -> bool:
    """Whether an attempt with room on coming nodes waits, because guests are about to leave enough existing nodes.

    Young pods of another job may have no node yet, and the attempt's pods would take their nodes: it waits then, too.
    """
    others = [each.status for each in ctx.snapshot.holders if not _awaits_nodes(each.status.reserved)]
    ages = (ctx.age(parsed(each.attempts[-1].start_time)) for each in others if each.attempts)
    youngest = min(ages, default=BINDING_SECONDS)
    own = replace(ctx.snapshot.job, status=ctx.status)
    has_givers = bool(giving.find_givers(ctx, own, pods, ctx.snapshot.holders))
    return has_givers or ctx.must_wait(BINDING_SECONDS - youngest)


def _awaits_nodes(room: Sequence[Reserved]) -> bool:
    """Whether some of this room is on nodes that groups are yet to add."""
    return any(names.group_of(each.node) for each in room)


def _wait(ctx: ReconcileContext, job: Job, ahead: list[ObservedJob]) -> None:
    """Put the job into the line, or leave it there. A job that would not fit if all others had ended is in no line."""
    is_mapped = ctx.status.mapping is not None and conditions.in_line(ctx.status)
    if is_mapped and len(_rivals(ctx, ahead)) >= MAX_REPORTED_POSITIONS:
        _set_waiting(ctx, FAR_BEHIND)
        return
    mapping = _mapping_on(ctx, job, replace(ctx.snapshot, taken=ctx.snapshot.taken_by_foreign_pods()))
    if mapping is None:
        return
    ctx.set_status(reserved=())
    rivals, message = _rivals(ctx, ahead), FAR_BEHIND
    if len(rivals) < MAX_REPORTED_POSITIONS:
        ctx.requeue_after(RECHECK_SECONDS)
        message = _place_in_line(ctx, rivals, groups_of(ctx.snapshot, job, mapping, ctx.settings))
    _set_waiting(ctx, message)


def _place_in_line(ctx: ReconcileContext, rivals: list[ObservedJob], pods: list[Group]) -> str:
    """Return a sentence on who is before the job in line, what the job lacks, and when it may begin."""
    first = f"{rivals[0].namespace}/{rivals[0].name}" if rivals else ""
    lacks = place(pods, ctx.snapshot).lacks
    why = f"no node has room for {lacks}" if lacks else "the free room is kept for that job" * bool(first)
    when = "" if rivals else giving.givers_in_words(ctx)
    when = when or forecast.start_in_words(forecast.expected_start(ctx, rivals, pods), ctx.now)
    where = f"{_ordinal(len(rivals) + 1)} in line{f' behind {first}' * bool(first)}"
    return f"{'; '.join(filter(None, (where, why, when)))}."


def _mapping_on(ctx: ReconcileContext, job: Job, emptied: Snapshot) -> MappedPlacement | None:
    """Return the mapping that a job would have if all other jobs had ended; None: the condition Mapped says why."""
    mapping, result = ctx.status.mapping, None
    if mapping is None or not still_fits(job, mapping, emptied, ctx.settings):
        ctx.require_live("the attempt that waits is mapped")
        result = map_job(job, emptied, ctx.settings)
        if result.mapping is None:
            _set_unmapped(ctx, result.reason, result.message)
            return None
        mapping = result.mapping
    if lacks := place(groups_of(ctx.snapshot, job, mapping, ctx.settings), emptied).lacks:
        what = f"no node has room for {lacks}, even if all RLHFJobs that run had ended; add nodes, or see spec.runtime"
        _set_unmapped(ctx, "NoFeasiblePlacement", what)
        return None
    if result is not None:
        _set_mapped(ctx, result)
    return mapping


def _set_waiting(ctx: ReconcileContext, message: str) -> None:
    ctx.set_condition("QuotaReserved", "False", conditions.WAITING, message)
    ctx.set_condition("Training", "False", "NotStarted", "The next attempt waits for room.")
    finish.fail_if_queued_too_long(ctx)


def _set_mapped(ctx: ReconcileContext, result: MappingResult) -> None:
    assert result.mapping is not None, "there is a place"
    ctx.set_status(mapping=result.mapping)
    ctx.set_condition("Mapped", "True", result.reason, result.message)
    ctx.add_event("Normal", "Mapped", result.message)


def _set_unmapped(ctx: ReconcileContext, reason: MappingReason, message: str) -> None:
    ctx.set_status(mapping=None, reserved=())
    if not ctx.snapshot.readers:
        shapes.forget_problems(ctx)  # the Job that had these problems is gone; a new Job reads again
    ctx.set_condition("Mapped", "False", reason, message)
    ctx.requeue_after(RECHECK_SECONDS)


def _summary(mapping: MappedPlacement) -> str:
    pools = "; ".join(f"{', '.join(pool.models)}: {pool.nodes} x {pool.slots_per_node}" for pool in mapping.pools)
    return f"{slots_text(mapping.slots, mapping.device)} ({pools})."


def jobs_ahead(ctx: ReconcileContext) -> list[ObservedJob]:
    """Return the jobs in line whose turn comes before this job's."""
    own = ctx.turns.of(ctx.snapshot.job)
    return [each for each in waiting_jobs(ctx) if ctx.turns.of(each) < own]


def waiting_jobs(ctx: ReconcileContext) -> list[ObservedJob]:
    """Return the other jobs in line; [] if this job is in no line."""
    now = ctx.snapshot
    return [
        each
        for each in now.line
        # A job without conditions may wait after its first pass.
        if now.in_line
        if each.status.conditions or not (now.in_queue(each) or each.spec.get("suspend") is True)
    ]


def _rivals(ctx: ReconcileContext, ahead: list[ObservedJob]) -> list[ObservedJob]:
    """Return the jobs ahead in line that may use some of the same nodes, in the order of their turns."""
    own = ctx.turns.demand(replace(ctx.snapshot.job, status=ctx.status).node_request).nodes
    rivals = {each for each in {job.node_request for job in ahead} if not own.isdisjoint(ctx.turns.demand(each).nodes)}
    return sorted((job for job in ahead if job.node_request in rivals), key=ctx.turns.of)


def _ordinal(position: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(position % 10, "th") if position % 100 not in (11, 12, 13) else "th"
    return f"{position}{ending}"
