"""The line of jobs that wait for room on the nodes: the oldest first, and a job begins with all its pods or not at all.

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

from rlhf_api.job import Job
from rlhf_api.runtime import Runtime
from rlhf_api.status import MappedPlacement
from rlhf_operator import conditions, failure, names, placement, resources
from rlhf_operator.actions import Manifest
from rlhf_operator.placement.suitable import suits
from rlhf_operator.reconcile import finish, shapes
from rlhf_operator.reconcile.context import NotYetError, ReconcileContext
from rlhf_operator.reconcile.room import room_for
from rlhf_operator.resources.pods import Pods
from rlhf_operator.snapshot import ObservedJob, Snapshot, amounts

LOOK_AGAIN_SECONDS: Final = 60.0
"""Nodes come and go without an event about the job, and so do many pods of others."""
WAITING: Final = "WaitingForRoom"
"""Reason of QuotaReserved=False of a job in line."""


def is_kept(ctx: ReconcileContext) -> bool:
    """Whether the operator itself says when the job may begin."""
    return ctx.snapshot.nodes is not None and names.QUEUE not in ctx.snapshot.job.labels


def turn(job: ObservedJob) -> tuple[datetime, str, str]:
    """Jobs have their turn in this order."""
    return job.created, job.namespace, job.name


def beginning(ctx: ReconcileContext, job: Job) -> tuple[MappedPlacement, tuple[str, ...]] | None:
    """Where the models will live, and the nodes to keep off, once it is the job's turn and there is room.

    The mapping is as before, as long as that can be kept. None: a condition says what the job waits for.
    """
    ahead = _ahead(ctx)
    if any(not each.status.conditions for each in ahead):
        raise NotYetError
    wanted = frozenset[str]().union(*(_wanted(each, ctx) for each in ahead))
    is_open = not ahead or any(each.name not in wanted for each in ctx.snapshot.nodes or ())
    have = ctx.status.mapping
    # Where there is no room without the nodes on which attempts failed, they are used all the same.
    for avoided in dict.fromkeys((failure.bad_nodes(ctx.snapshot, ctx.now), ())):
        seen = _with_full(ctx.snapshot, wanted).without(avoided)
        if is_open and have and placement.still_fits(job, have, seen, ctx.settings) and _reserves(ctx, job, have, seen):
            if not ctx.holds("Mapped"):
                ctx.set_condition("Mapped", "True", "Mapped", _summary(have))
            return have, avoided
        if not shapes.are_read(ctx, job):
            ctx.set_status(mapping=None, reserved=())
            return None
        if not is_open:
            continue
        ctx.require_live("the next attempt is mapped", alone=is_kept(ctx))
        result = placement.map_job(job, seen, ctx.settings)
        if result.mapping is not None and _reserves(ctx, job, result.mapping, seen):
            _set_mapped(ctx, result)
            return result.mapping, avoided
    if is_kept(ctx):
        _wait(ctx, job, ahead)
    else:
        _set_unmapped(ctx, result.reason, result.message)
    return None


def _reserves(ctx: ReconcileContext, job: Job, mapping: MappedPlacement, seen: Snapshot) -> bool:
    """Whether all pods of an attempt have room; that is the job's from now on."""
    if not is_kept(ctx):
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
        what = f"no node has room for {lacks}, even if all RLHFJobs had ended; add nodes, or see spec.runtime"
        _set_unmapped(ctx, "NoFeasiblePlacement", what)
        return
    if result is not None:
        _set_mapped(ctx, result)
    ctx.set_status(reserved=())
    ctx.requeue_after(LOOK_AGAIN_SECONDS)
    mine = _wanted(replace(now.job, status=ctx.status), ctx)
    place = 1 + sum(not mine.isdisjoint(_wanted(each, ctx)) for each in ahead)
    lacks = room_for(rayjob, nodes, now.taken).lacks
    message = f"{_ordinal(place)} in line{f'; no node has room for {lacks}' * bool(lacks)}."
    ctx.set_condition("QuotaReserved", "False", WAITING, message)
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


def _ahead(ctx: ReconcileContext) -> list[ObservedJob]:
    """The jobs that come before this one; none where it holds its room already."""
    own = ctx.snapshot.job
    if own.status.reserved or not is_kept(ctx):
        return []
    return [each for each in ctx.snapshot.line if turn(each) < turn(own) and _is_in_line(each)]


def _is_in_line(job: ObservedJob) -> bool:
    """Whether a job lacks nothing but room; one that has not been looked at yet may be such a one."""
    if not job.status.conditions:
        return names.QUEUE not in job.labels and job.spec.get("suspend") is not True
    reserved = conditions.found(job.status.conditions, "QuotaReserved")
    return job.status.phase == "Queued" and reserved is not None and reserved.reason == WAITING


def _with_full(snapshot: Snapshot, wanted: frozenset[str]) -> Snapshot:
    """The snapshot with nothing free on the nodes that those ahead may want."""
    full = {node.name: amounts(node.allocatable) for node in snapshot.nodes or () if node.name in wanted}
    return replace(snapshot, taken={**snapshot.taken, **full})


def _wanted(job: ObservedJob, ctx: ReconcileContext) -> frozenset[str]:
    """Names of the nodes on which the workers of a waiting job may be; of a job without a mapping all that suit it."""
    mapping = job.status.mapping
    gpus = frozenset(pool.gpu for pool in mapping.pools) if mapping else frozenset({None})
    key = (json.dumps(job.spec.get("runtime", {}), sort_keys=True), mapping.device if mapping else None, gpus)
    if key not in ctx.wanted:
        runtime = _runtime(key[0])
        resource = "" if mapping and mapping.device == "CPU" else ctx.settings.gpu_resource_of(runtime)
        pod = ctx.settings.pod_of(runtime, names.WORKER)
        suiting = [node for node in ctx.snapshot.nodes or () if suits(node, pod, resource)]
        if mapping and resource:
            suiting = [node for node in suiting if resource in node.allocatable]
        if None not in gpus:
            known = ((node, ctx.settings.gpu_of(names.gpu_product(node.labels, resource))) for node in suiting)
            suiting = [node for node, gpu in known if gpu and gpu.name in gpus]
        ctx.wanted[key] = frozenset(node.name for node in suiting)
    return ctx.wanted[key]


@lru_cache(maxsize=1024)
def _runtime(text: str) -> Runtime:
    """spec.runtime; without any wishes where it cannot be read."""
    try:
        return Runtime.model_validate(json.loads(text), by_alias=True, by_name=False)
    except ValidationError:
        return Runtime()


def _ordinal(place: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, 21st."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th") if place % 100 not in (11, 12, 13) else "th"
    return f"{place}{ending}"
