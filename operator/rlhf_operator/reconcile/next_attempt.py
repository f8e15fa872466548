"""Decisions before the first attempt, between two attempts, and during a suspension."""

from typing import Final

from rlhf_api.job import Job
from rlhf_api.status import Attempt, MappedPlacement
from rlhf_operator import conditions, failure, names, observed_attempt
from rlhf_operator.actions import Create
from rlhf_operator.placement.capacity import counted
from rlhf_operator.placement.claim_size import claim_size
from rlhf_operator.reconcile import attempt_status, cleanup, finish, inputs, line, shapes
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.resources.attempt import attempt_manifests
from rlhf_operator.resources.pods import AttemptPods, image_of
from rlhf_operator.times import parsed, timestamp

MAX_BACKOFF_AHEAD: Final = 2 * finish.MAX_BACKOFF_SECONDS
"""Most seconds until a valid nextAttemptTime; a later time, from a clock that was set back, is ignored."""


def prepare(ctx: ReconcileContext) -> None:
    """Start the next attempt once nothing stands in its way; else name the obstacle in a condition."""
    is_clear = cleanup.clear(ctx)
    if not is_clear:
        attempt_status.update_last_words(ctx)
    if ctx.snapshot.job.spec.get("suspend") is True or ctx.snapshot.job.is_paused:
        _stay_suspended(ctx, is_clear=is_clear)
        return
    if ctx.holds("Suspended"):
        ctx.set_status(mapping=None)  # other nodes may be there by now
    if ctx.condition("Suspended") is not None:
        ctx.set_condition("Suspended", "False", "Resumed", "Neither spec.suspend nor spec.watch holds it.")
    job = inputs.accepted(ctx)
    if job is None or not inputs.ready(ctx, job):
        ctx.set_status(reserved=())
        return
    if (left := finish.fail_if_too_late(ctx)) is not None and left <= 0:
        return
    if not is_clear:
        _wait_for_end(ctx)
    elif not _is_backing_off(ctx) and (turn := line.reserve_room(ctx, job)) is not None:
        _start(ctx, job, turn._replace(mapping=_with_smaller_micro_batches(ctx, job, turn.mapping)))


def _wait_for_end(ctx: ReconcileContext) -> None:
    if ctx.status.attempt is not None and ctx.outcome != "Withdrawn":
        pods = ", ".join(sorted(pod.name for pod in ctx.snapshot.pods)[:3])
        left = f"{pods} of the last attempt" if pods else "the RayJob of the last attempt, which KubeRay has to let go,"
        lost = {pod.node for pod in ctx.snapshot.pods if observed_attempt.silent_since(pod, ctx.snapshot)}
        silent = ", ".join(sorted(lost))
        end = f" or given up, {cleanup.GIVE_UP_SECONDS:.0f} s after {silent} ceased to be ready" if silent else ""
        ctx.set_condition("Training", "False", conditions.RESTARTING, f"Waits until {left} is gone{end}.")


def _stay_suspended(ctx: ReconcileContext, *, is_clear: bool) -> None:
    if ctx.is_open:  # the status names an attempt whose RayJob was never created
        finish.suspend(ctx)
    ctx.set_status(next_attempt_time=None, reserved=())
    if is_clear and ctx.snapshot.job.is_paused:
        remedy = "Any change of the spec, or kubectl rlhf resume, has the job go on."
        ctx.set_condition("Suspended", "True", "PausedByWatch", " ".join([*ctx.status.causes[-1:], remedy]))
    elif is_clear:
        ctx.set_condition("Suspended", "True", "SuspendedByUser", "spec.suspend is true; set it to false to go on.")
    else:
        message = finish.SUSPENDS if ctx.snapshot.pods else "The slots are free; KubeRay has to let the RayJob go."
        ctx.set_condition("Suspended", "False", conditions.SUSPENDING, message)


def _is_backing_off(ctx: ReconcileContext) -> bool:
    after = parsed(ctx.status.next_attempt_time)
    rest = (after - ctx.now).total_seconds() if after else 0.0
    return rest <= MAX_BACKOFF_AHEAD and ctx.must_wait(rest)


def _with_smaller_micro_batches(ctx: ReconcileContext, job: Job, mapping: MappedPlacement) -> MappedPlacement:
    """Return the mapping with half the micro-batch tokens that did not fit into memory, but at least one sequence."""
    too_large = [each.micro_batch_tokens for each in ctx.status.attempts if each.micro_batch_tokens]
    if not too_large:
        return mapping
    tokens = max(min(too_large) // 2, job.spec.data.max_prompt_tokens + job.spec.data.max_response_tokens)
    smaller = mapping.model_copy(update={"micro_batch_tokens": min(tokens, mapping.micro_batch_tokens or tokens)})
    if smaller != mapping:
        now = f"they have {tokens} now" if tokens < min(too_large) else "they cannot be smaller than a sequence"
        message = f"A device had no memory for micro-batches of {min(too_large)} tokens; {now}."
        ctx.set_status(mapping=smaller)
        ctx.set_condition("Mapped", "True", "SmallerMicroBatches", message)
        ctx.add_event("Normal", "SmallerMicroBatches", message)
    return smaller


def _set_quota(ctx: ReconcileContext, number: int, queue: str | None, *, was_withdrawn: bool) -> None:
    if queue and not ctx.snapshot.in_line:  # without Kueue the label has no meaning
        message = f"Attempt {number} waits to be admitted by queue {queue}."
        ctx.set_condition("QuotaReserved", "False", "Pending", message)
    elif coming := ctx.coming_nodes:
        groups = " and ".join(sorted({names.group_of(each) for each in coming}))
        message = f"Attempt {number} waits for {counted(len(coming), 'node')} that node group {groups} is to add."
        ctx.set_condition("QuotaReserved", "False", conditions.WAITING_FOR_NODES, message)
    elif was_withdrawn:  # stays False: the deadline in the queue goes on
        ctx.set_condition("QuotaReserved", "False", "Withdrawn", f"Attempt {number} waits for nodes for all its pods.")
    else:
        ctx.set_condition("QuotaReserved", "True", *attempt_status.NOT_QUEUED)


def _report_avoided(ctx: ReconcileContext, number: int, avoided: tuple[str, ...]) -> None:
    """Add an event about the nodes, and the groups of nodes, that an attempt avoids."""
    if avoided:
        hours = f"{failure.NODE_AVOIDED_SECONDS / 3600:.0f} h"
        places = ", ".join(sorted({names.group_of(each) or each for each in avoided}))
        message = f"Attempt {number} keeps off {places}: attempts failed there in the last {hours}."
        ctx.add_event("Normal", "NodesAvoided", message)


def _start(ctx: ReconcileContext, job: Job, turn: line.Turn) -> None:
    """Name the next attempt in the status and create its RayJob; a named attempt that was not created comes first."""
    named = ctx.record if ctx.is_open else None
    number = named.attempt if named else (ctx.status.attempt or 0) + 1
    if inputs.conflict(ctx, names.rayjob_name(job.name, number)):
        ctx.set_status(reserved=())
        return
    ctx.require_live(f"attempt {number} begins")
    was_withdrawn = ctx.outcome == "Withdrawn"
    queue = ctx.snapshot.job.labels.get(names.QUEUE) or None
    start = named.start_time if named else timestamp(ctx.now)
    slots, is_early = turn.mapping.slots, turn.is_backfilled
    record = Attempt(attempt=number, start_time=start, slots=slots, outcome="Starting", backfilled=is_early)
    ctx.begin_record(record)
    shapes.forget_problems(ctx)
    ctx.set_status(
        start_time=ctx.status.start_time or start,
        failed_attempts=ctx.status.failed_attempts or 0,
        next_attempt_time=None,
        ray_job_name=None,
        head_pod=None,
        image=image_of(job, ctx.settings)["image"],
        image_pull_secrets=ctx.settings.runtime_of(job.spec.runtime).image_pull_secrets,
        queue=queue,
    )
    _set_quota(ctx, number, queue, was_withdrawn=was_withdrawn)
    rayjob = names.rayjob_name(job.name, number)
    is_made = "is not made: see condition Accepted" if ctx.snapshot.refused else "is made"
    ctx.set_condition("ClusterReady", "False", "Starting", f"RayJob {rayjob} {is_made}.")
    ctx.set_condition("Training", "False", "NotStarted", f"Attempt {number} has not begun to train.")
    if (refused := ctx.snapshot.refused) is not None:
        ctx.set_condition("Accepted", "False", refused.reason, refused.message)
        ctx.set_status(reserved=())  # other jobs may begin meanwhile
    _report_avoided(ctx, number, turn.avoided)
    pods = AttemptPods(
        snapshot=ctx.snapshot,
        job=job,
        mapping=turn.mapping,
        settings=ctx.settings,
        attempt=number,
        avoided=turn.avoided,
    )
    made = attempt_manifests(pods, claim_size=claim_size(job, ctx.snapshot))
    ctx.actions.extend(Create(manifest=each) for each in made)
