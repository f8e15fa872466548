"""Elastic pool: a rollout pool that takes idle nodes, or has groups add some, and gives them to any job in line.

It grows by one allowed size (`Job.allowed_node_counts`) at a time, once the trainer uses the current one. The status
has the desired size and the leaving pods, and each pass asks KubeRay for that size until there are as many pods. The
trainer is not told: it looks which nodes Ray has.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from rlhf_api.job import Job
from rlhf_api.status import MappedPlacement, MappedPool, Reserved
from rlhf_operator import failure, names, observed_attempt
from rlhf_operator.actions import Resize
from rlhf_operator.placement.capacity import counted
from rlhf_operator.reconcile import giving, line
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.reconcile.room import groups_of, held_by, place, with_sandboxes
from rlhf_operator.snapshot import ObservedPod
from rlhf_operator.times import parsed, timestamp

TRAINER_WAITS: Final = 0.1
"""Share of a step: the pool grows if the trainer waits for more than this share."""
TRAINER_WORKS, POOL_WAITS = 0.05, 0.3
"""Shares of a step: the pool shrinks if the trainer waits for less, and the pool for more, than these."""
SETTLE_STEPS: Final = 3
"""Steps after a change of size whose idle times are ignored: the first of them still run at the old size."""
STEADY_STEPS: Final = 50
"""Steps in which a pool that has shrunk for other reasons than a waiting job does not grow again."""
RESIZE_SECONDS: Final = 600.0
"""Seconds in which all desired pods must run and the trainer must use them; else the pool shrinks to those in use."""


class ObservedPool(NamedTuple):
    """Elastic pool of a running attempt, as one pass observes it."""

    job: Job
    mapping: MappedPlacement
    pool: MappedPool
    pods: list[ObservedPod]
    """Pods that are not about to end; ready ones come first."""
    sizes: list[int]
    """Allowed numbers of nodes, ascending."""
    step: int
    used: float
    """Number of nodes that the trainer used in the latest step."""


class NewSize(NamedTuple):
    """Size that the pool is to have, and why."""

    nodes: int
    why: str
    steady_steps: int
    stays: Sequence[ObservedPod]
    added: tuple[Reserved, ...] = ()
    """Room of the additional pods."""


def resize(ctx: ReconcileContext) -> None:
    """Decide whether the elastic pool of a running attempt, if there is one, grows or shrinks, and tell KubeRay."""
    if (found := _observed_pool(ctx)) is None:
        return
    if new := _give_to_a_job(ctx, found) or _follow(ctx, found):
        _begin(ctx, found, new)
    elif len(found.pods) == found.pool.node_count and all(each.node for each in found.pods):
        ctx.set_status(reserved=_held(ctx, found, found.pods))
    now, observed = ctx.status.mapping and ctx.status.mapping.elastic_pool, ctx.snapshot.current_rayjob()
    living = sum(not observed_attempt.how_ended(each) for each in observed_attempt.elastic_pods(ctx.snapshot))
    if now and observed and observed.cluster and living != now.node_count:
        ctx.require_live(f"KubeRay is told of pool {now.name}")
        size, leaving = now.node_count, now.leaving_pods
        ctx.actions.append(Resize(cluster=observed.cluster, pool=now.name, nodes=size, leaving=leaving))


def _observed_pool(ctx: ReconcileContext) -> ObservedPool | None:
    """Return the elastic pool of an attempt that makes steps and is in no queue of Kueue; None if there is none."""
    mapping, job, record = ctx.status.mapping, ctx.job, ctx.record
    # Progress and metrics before the first step are those of an earlier attempt.
    progress = ctx.status.progress if record and record.first_step is not None else None
    pool = mapping.elastic_pool if mapping and ctx.snapshot.in_line and ctx.holds("ClusterReady") else None
    if not (mapping and pool and job and progress):
        return None
    pods = [pod for pod in observed_attempt.elastic_pods(ctx.snapshot) if not observed_attempt.is_leaving(pod, pool)]
    used = _metric(ctx, "rollout_nodes")
    return ObservedPool(job, mapping, pool, pods, job.allowed_node_counts(pool), progress.step, used)


def _metric(ctx: ReconcileContext, name: str) -> float:
    """Return a metric of the latest step; 0 if there is no such number."""
    value = ctx.status.measures.get(name, 0.0)
    return value if math.isfinite(value) else 0.0


def _follow(ctx: ReconcileContext, found: ObservedPool) -> NewSize | None:
    """Return a new size by the latest step's idle times, or a smaller one if the desired size is overdue; else None."""
    pool, running = found.pool, sum(each.ready for each in found.pods)
    first = ctx.record.first_step or 0 if ctx.record else 0
    is_steady = found.step < max(pool.steady_until_step or 0, first + SETTLE_STEPS)
    if running == pool.node_count == found.used:
        there = {each.name for each in ctx.snapshot.pods}
        leaving = tuple(each for each in pool.leaving_pods if each in there)  # KubeRay may not know of them yet
        ctx.set_status(mapping=found.mapping.resized(resizing_since=None, leaving_pods=leaving))
        return None if is_steady else _follow_idle_shares(ctx, found)
    if (since := parsed(pool.resizing_since)) is None:
        until = max(pool.steady_until_step or 0, found.step + SETTLE_STEPS)
        ctx.set_status(mapping=found.mapping.resized(resizing_since=timestamp(ctx.now), steady_until_step=until))
    is_whole = running == pool.node_count
    groups = sorted({names.group_of(each.node) for each in ctx.status.reserved} - {""})
    limit = ctx.settings.seconds_to_add(groups, RESIZE_SECONDS)
    if ctx.must_wait(limit - ctx.age(since)) or (is_whole and is_steady):
        return None
    nodes = _largest(found, found.used if is_whole else running)
    does = f"the trainer uses {found.used:g}" if is_whole else f"pods run on {running}"
    lacking = f"node group {' and '.join(groups)} has not added all nodes, and " * bool(groups)
    new = NewSize(nodes, f"after {limit:.0f} s {lacking}{does}", STEADY_STEPS, found.pods[:nodes])
    return new if nodes < pool.node_count else None


def _largest(found: ObservedPool, nodes: float) -> int:
    """Return the largest allowed size of at most `nodes`; the smallest size if there is none."""
    return max((size for size in found.sizes if size <= nodes), default=found.pool.nodes)


def _follow_idle_shares(ctx: ReconcileContext, found: ObservedPool) -> NewSize | None:
    trainer, pool, now = _metric(ctx, "trainer_idle"), _metric(ctx, "rollout_idle"), found.pool.node_count
    if trainer > TRAINER_WAITS and (larger := [size for size in found.sizes if size > now]):
        why = f"the trainer waited {trainer * 100:.0f} % of step {found.step}"
        room = _free_room(ctx, found, larger[0] - now)
        return NewSize(larger[0], why, SETTLE_STEPS, found.pods, room) if room else None
    if pool > POOL_WAITS and trainer < TRAINER_WORKS and now > found.pool.nodes:
        nodes, why = _largest(found, now - 1), f"the pool waited {pool * 100:.0f} % of step {found.step}"
        return NewSize(nodes, why, STEADY_STEPS, found.pods[:nodes])
    return None


def _free_room(ctx: ReconcileContext, found: ObservedPool, count: int) -> tuple[Reserved, ...]:
    """Return room for `count` more pods, preferably on existing nodes; () if a waiting job may use these nodes."""
    seen, avoided = ctx.snapshot, failure.bad_nodes(ctx.snapshot, ctx.now)
    groups = groups_of(seen, found.job, found.mapping, ctx.settings, avoided)
    group = groups[1 + found.mapping.pools.index(found.pool)]
    room = place([replace(group, count=count)], seen.without(avoided).also_taken(ctx.status.reserved))
    nodes = {each.node for each in room.reserved}
    is_free = nodes.isdisjoint(giving.nodes_for_waiting(ctx, line.waiting_jobs(ctx)))
    return room.reserved if is_free and not room.lacks else ()


def _give_to_a_job(ctx: ReconcileContext, found: ObservedPool) -> NewSize | None:
    """Return a smaller size that leaves a waiting job enough room to begin; None if no size does."""
    own, now = ctx.snapshot.job, found.pool.node_count
    # Of several jobs with extra nodes the job with the lowest uid gives first.
    others = [each.without_extras() if each.uid < own.uid else each for each in ctx.snapshot.holders]
    has_coming = any(each.extra and names.group_of(each.node) for each in ctx.status.reserved)
    seen = (ctx.snapshot if has_coming else ctx.snapshot.existing()).taken_only_by(others)
    waiting = sorted(line.waiting_jobs(ctx), key=ctx.turns.of) if now > found.pool.nodes else []
    for job in waiting[: line.MAX_REPORTED_POSITIONS]:
        wished, pods = ctx.turns.demand(job.node_request).nodes, giving.fewest_pods(ctx, job)
        stays = sorted(found.pods, key=lambda pod: (not pod.node, pod.node in wished))
        for size in (now, *(each for each in found.sizes[::-1] if each < now)) if pods else ():
            kept = ctx.status.reserved if size == now else _held(ctx, found, stays[:size])
            if not place(pods, seen.also_taken(kept)).lacks:
                why = f"{job.namespace}/{job.name} waits for room"
                return NewSize(size, why, SETTLE_STEPS, stays[:size]) if size < now else None
    return None


def _held(ctx: ReconcileContext, found: ObservedPool, pods: Sequence[ObservedPod]) -> tuple[Reserved, ...]:
    """Return the room that the attempt holds if only these pods of the pool stay."""
    bound, fewest = [each for each in pods if each.node], found.pool.nodes
    needed = [pod for pod in observed_attempt.current_pods(ctx.snapshot) if pod.node and pod.pool != found.pool.name]
    least = with_sandboxes(held_by((*needed, *bound[:fewest])), found.job, ctx.snapshot, ctx.settings)
    return (*least, *held_by(bound[fewest:], is_extra=True))


def _begin(ctx: ReconcileContext, found: ObservedPool, new: NewSize) -> None:
    """Write a new size into the status."""
    ctx.require_live(f"pool {found.pool.name} is resized", alone=True)
    resized = found.mapping.resized(
        desired_nodes=new.nodes,
        leaving_pods=(*found.pool.leaving_pods, *(each.name for each in found.pods if each not in new.stays)),
        resizing_since=timestamp(ctx.now),
        steady_until_step=found.step + new.steady_steps,
    )
    ctx.set_status(
        mapping=resized,
        reserved=(*_held(ctx, found, new.stays), *(each.model_copy(update={"extra": True}) for each in new.added)),
    )
    sizes = f"{found.pool.node_count} -> {counted(new.nodes, 'node')}"
    ctx.add_event("Normal", "RolloutPoolResized", f"Pool {found.pool.name}: {sizes}, because {new.why}.")
