"""The line of jobs that wait for room: by priority, then by age; a job begins with all its pods or not at all.

A job's place in line, and the room that it holds from its turn on, follow from the statuses of all jobs alone. Jobs in
a queue of Kueue, and all jobs where the operator may not read nodes, are in no line.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Final

from pydantic import ValidationError

from rlhf_api.checks.pod_template import template_problems
from rlhf_api.job import Job
from rlhf_api.spec.runtime import Runtime
from rlhf_api.status import MappedPlacement, Status
from rlhf_operator import conditions, failure, names, placement, resources
from rlhf_operator.actions import Manifest
from rlhf_operator.placement.suitable import suits
from rlhf_operator.reconcile import finish, shapes
from rlhf_operator.reconcile.context import NotYetError, ReconcileContext, Wanted
from rlhf_operator.reconcile.room import room_for, with_head
from rlhf_operator.resources.pods import Pods
from rlhf_operator.snapshot import ObservedInput, ObservedJob, Snapshot, Wants, inputs_of

LOOK_AGAIN_SECONDS: Final = 60.0
"""Nodes come and go without an event about the job, and so do many pods of others."""
PLACES_TOLD: Final = 10
"""Who is further behind is not told of everyone that goes: a thousand statuses would be written for each job."""
FAR_BEHIND: Final = f"At least {PLACES_TOLD} jobs are before it in line."


def beginning(ctx: ReconcileContext, job: Job) -> tuple[MappedPlacement, tuple[str, ...]] | None:
    """Where the models will live, and the nodes to keep off, once it is the job's turn and there is room.

    The mapping is as before, as long as that can be kept. None: a condition says what the job waits for.
    """
    older, has_room = elders(ctx), bool(ctx.status.reserved)
    ahead = [] if has_room else older
    if any(not each.status.conditions for each in ahead):
        raise NotYetError
    have = ctx.status.mapping
    # Who holds room goes on at once, but takes no more of it before its elders.
    most = have if has_room and older else None
    wanted = frozenset[str]().union(*(_wanted(wants, ctx).nodes for wants in {each.wants for each in ahead}))
    is_open = not ahead or not _wanted(replace(ctx.snapshot.job, status=Status()).wants, ctx).nodes <= wanted
    free = _with_full(_with_head(ctx, ahead), wanted) if is_open else ctx.snapshot
    # Where there is no room without the nodes on which attempts failed, they are used all the same.
    for avoided in dict.fromkeys((failure.bad_nodes(ctx.snapshot, ctx.now), ())):
        seen = free.without(avoided)
        if is_open and have and placement.still_fits(job, have, seen, ctx.settings) and _reserves(ctx, job, have, seen):
            if not ctx.holds("Mapped"):
                ctx.set_condition("Mapped", "True", "Mapped", _summary(have))
            return have, avoided
        if not shapes.are_read(ctx, job):
            ctx.set_status(mapping=None, reserved=())
            return None
        if not is_open:
            continue
        if not ctx.snapshot.in_line:
            ctx.require_live("the next attempt is mapped")
        result = placement.map_job(job, seen, ctx.settings, as_large_as=most)
        new = result.mapping
        if new and (most is None or new.slots <= most.slots) and _reserves(ctx, job, new, seen):
            _set_mapped(ctx, result)
            return new, avoided
    if ctx.snapshot.in_line:
        _wait(ctx, job, older)
    else:
        _set_unmapped(ctx, result.reason, result.message)
    return None


def _reserves(ctx: ReconcileContext, job: Job, mapping: MappedPlacement, seen: Snapshot) -> bool:
    """Whether all pods of an attempt have room; that is the job's from now on."""
    if not ctx.snapshot.in_line:
        return True
    found = room_for(_rayjob(ctx, job, mapping), seen.nodes or (), seen.taken)
    if found.lacks:
        return False
    ctx.require_live("room is reserved", alone=True)
    ctx.set_status(reserved=found.reserved)
    return True


def _rayjob(ctx: ReconcileContext, job: Job, mapping: MappedPlacement) -> Manifest:
    """The RayJob of an attempt, as far as room is concerned."""
    pods = Pods(
        snapshot=ctx.snapshot, job=job, mapping=mapping, settings=ctx.settings, attempt=1, avoided=(), config_map=""
    )
    return resources.rayjob(pods)


def _wait(ctx: ReconcileContext, job: Job, ahead: list[ObservedJob]) -> None:
    """Joins the line, or stays in it. A job that would not fit if all others had ended is in no line."""
    now, mapping = ctx.snapshot, ctx.status.mapping
    if mapping is not None and conditions.in_line(ctx.status) and _place(ctx, ahead) > PLACES_TOLD:
        _set_waiting(ctx, FAR_BEHIND)
        return
    emptied = replace(now, taken=now.taken_by_strangers())
    result = None
    if mapping is None or not placement.still_fits(job, mapping, emptied, ctx.settings):
        ctx.require_live("the attempt that waits is mapped")
        result = placement.map_job(job, emptied, ctx.settings)
        mapping = result.mapping
    if mapping is None:
        assert result is not None, "the mapper was asked"
        _set_unmapped(ctx, result.reason, result.message)
        return
    rayjob, nodes = _rayjob(ctx, job, mapping), now.nodes or ()
    if lacks := room_for(rayjob, nodes, emptied.taken).lacks:
        what = f"no node has room for {lacks}, even if all RLHFJobs that run had ended; add nodes, or see spec.runtime"
        _set_unmapped(ctx, "NoFeasiblePlacement", what)
        return
    if result is not None:
        _set_mapped(ctx, result)
    ctx.set_status(reserved=())
    if (place := _place(ctx, ahead)) > PLACES_TOLD:
        _set_waiting(ctx, FAR_BEHIND)
        return
    ctx.requeue_after(LOOK_AGAIN_SECONDS)
    lacks = room_for(rayjob, nodes, now.taken).lacks
    _set_waiting(ctx, f"{_ordinal(place)} in line{f'; no node has room for {lacks}' * bool(lacks)}.")


def _set_waiting(ctx: ReconcileContext, message: str) -> None:
    ctx.set_condition("QuotaReserved", "False", conditions.WAITING, message)
    ctx.set_condition("Training", "False", "NotStarted", "The next attempt waits for room.")
    finish.fail_if_queued_too_long(ctx)


def _set_mapped(ctx: ReconcileContext, result: placement.MappingResult) -> None:
    assert result.mapping is not None, "there is a place"
    message = result.message or _summary(result.mapping)
    ctx.set_status(mapping=result.mapping)
    ctx.set_condition("Mapped", "True", result.reason, message)
    ctx.add_event("Normal", "Mapped", message)


def _set_unmapped(ctx: ReconcileContext, reason: placement.Reason, message: str) -> None:
    ctx.set_status(mapping=None, reserved=())
    if not ctx.snapshot.readers:
        shapes.forget_problems(ctx)  # the Job that met them has gone; another one reads
    ctx.set_condition("Mapped", "False", reason, message)
    ctx.requeue_after(LOOK_AGAIN_SECONDS)


def _summary(mapping: MappedPlacement) -> str:
    """Its pools in a few words."""
    pools = "; ".join(f"{', '.join(pool.models)}: {pool.nodes} x {pool.slots_per_node}" for pool in mapping.pools)
    return f"{mapping.slots} {mapping.device} slots ({pools})."


def elders(ctx: ReconcileContext) -> list[ObservedJob]:
    """The jobs in line whose turn comes before this one's."""
    now = ctx.snapshot
    mine = _turn(now.job, ctx)
    return [each for each in now.line if _may_wait(each, now) and _turn(each, ctx) < mine] if now.in_line else []


def _turn(job: ObservedJob, ctx: ReconcileContext) -> tuple[int, datetime, str, str]:
    """Jobs have their turn in this order: by priority, and of one priority by age."""
    return -_wanted(job.wants, ctx).priority, job.created, job.namespace, job.name


def _may_wait(job: ObservedJob, snapshot: Snapshot) -> bool:
    """Whether a job of the line waits there; one that has not been looked at yet does, as far as is known."""
    return bool(job.status.conditions) or not (snapshot.in_queue(job) or job.spec.get("suspend") is True)


def _place(ctx: ReconcileContext, ahead: list[ObservedJob]) -> int:
    """The place among the jobs that want the same nodes, or some of them."""
    mine = _wanted(replace(ctx.snapshot.job, status=ctx.status).wants, ctx).nodes
    rivals = {wants for wants in {each.wants for each in ahead} if not mine.isdisjoint(_wanted(wants, ctx).nodes)}
    return 1 + sum(each.wants in rivals for each in ahead)


def _with_full(snapshot: Snapshot, wanted: frozenset[str]) -> Snapshot:
    """The snapshot with nothing free on the nodes that those ahead may want."""
    full = {node.name: node.room for node in snapshot.nodes or () if node.name in wanted}
    return replace(snapshot, taken={**snapshot.taken, **full})


def _with_head(ctx: ReconcileContext, ahead: list[ObservedJob]) -> Snapshot:
    """The snapshot with room held for the head pod of the first in line, which may be where no worker goes."""
    snapshot = ctx.snapshot
    if not ahead:
        return snapshot
    first = min(ahead, key=lambda each: _turn(each, ctx))
    inputs = {name: ObservedInput(name=name) for name in inputs_of(first.spec)}  # wherever they are
    theirs = ReconcileContext.of(replace(snapshot, job=first, inputs=inputs), ctx.now, ctx.settings)
    mapping = theirs.status.mapping
    if theirs.job is None or mapping is None:
        return snapshot
    return replace(snapshot, taken=with_head(_rayjob(theirs, theirs.job, mapping), snapshot))


def _wanted(wants: Wants, ctx: ReconcileContext) -> Wanted:
    """What such a job wants: without a mapping all nodes that suit it."""
    if wants not in ctx.wanted:
        runtime, device, gpus = _runtime(wants[0]), *wants[1:]
        resource = "" if device == "CPU" else ctx.settings.gpu_resource_of(runtime)
        pod = ctx.settings.pod_of(runtime, names.WORKER)
        suiting = [node for node in ctx.snapshot.nodes or () if suits(node, pod, resource)]
        if device and resource:
            suiting = [node for node in suiting if resource in node.allocatable]
        if None not in gpus:
            known = ((node, ctx.settings.gpu_of(names.gpu_product(node.labels, resource))) for node in suiting)
            suiting = [node for node, gpu in known if gpu and gpu.name in gpus]
        priority = ctx.snapshot.priorities.get(pod.priority_class_name or "", 0)
        ctx.wanted[wants] = Wanted(frozenset(node.name for node in suiting), priority)
    return ctx.wanted[wants]


@lru_cache(maxsize=1024)
def _runtime(text: str) -> Runtime:
    """spec.runtime; without any wishes where it cannot be read."""
    try:
        runtime = Runtime.model_validate(json.loads(text), by_alias=True, by_name=False)
    except (ValidationError, RecursionError):
        return Runtime()
    return Runtime() if template_problems(runtime.worker.template or {}, "worker") else runtime


def _ordinal(place: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, 21st."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th") if place % 100 not in (11, 12, 13) else "th"
    return f"{place}{ending}"
