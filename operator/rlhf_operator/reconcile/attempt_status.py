"""Status of the running attempt: progress, checkpoint and conditions, as they were observed."""

from collections.abc import Sequence
from typing import Final

from rlhf_api.chain import read_inputs
from rlhf_api.status import ReadInput, SavedState, Status
from rlhf_operator import conditions, evidence, names, observed_attempt
from rlhf_operator.actions import Create
from rlhf_operator.reconcile import cleanup
from rlhf_operator.reconcile.context import BEFORE_AN_ATTEMPT, ReconcileContext
from rlhf_operator.reconcile.room import held_by, with_sandboxes
from rlhf_operator.resources import storage
from rlhf_operator.resources.attempt import disruption_budget
from rlhf_operator.snapshot import ObservedPod, ObservedQuota
from rlhf_operator.times import parsed, timestamp

MAX_METRICS: Final = 100
NOT_QUEUED: Final = ("NotQueued", "The job names no queue.")
IGNORED: Final = ("QueueIgnored", "No Kueue manages RayJobs here: the attempt was not held back.")
LACKS_NODES: Final = ("Withdrawn", conditions.WAITING_FOR_NODES)
"""Reasons of the condition QuotaReserved=False that hold until all pods have nodes."""
QUEUED: Final = "Queued"
"""Reason of the condition ClusterReady=False while Kueue keeps the RayJob suspended."""
PATIENCE_SECONDS: Final = 5.0
"""Seconds that KubeRay may take to create the pods of a RayJob; it usually takes less."""
LOOK_AGAIN_SECONDS: Final = 30.0
"""Seconds between two checks of why there are no pods."""
SLOW_START_SECONDS: Final = 60.0
"""Seconds after which containers that still wait are reported with the pod's events."""
SILENCE_SECONDS: Final = 60.0
"""Seconds without a heartbeat until Training becomes Unknown; four reading intervals if these are longer."""


def record_start(ctx: ReconcileContext) -> None:
    """Write RayJob and head pod into the status when they are first observed; a later absence is a failure."""
    rayjob = ctx.snapshot.current_rayjob()
    if rayjob is not None and ctx.status.ray_job_name != rayjob.name:
        ctx.set_status(ray_job_name=rayjob.name)
        ctx.set_record(start_time=timestamp(rayjob.created), outcome="Running")
    head = observed_attempt.head_of(ctx.snapshot)
    if head is not None and ctx.status.head_pod is None:
        ctx.set_status(head_pod=head.name)
    for kind in BEFORE_AN_ATTEMPT:  # missing only if the status was lost
        if not ctx.holds(kind):
            ctx.set_condition(kind, "True", kind, f"Attempt {ctx.status.attempt} proves it.")


def update_progress(ctx: ReconcileContext) -> bool:
    """Copy progress, metrics and checkpoint from the heartbeat; True if the trainer has finished another step."""
    beat = ctx.snapshot.current_heartbeat()
    if beat is None or ctx.record is None or beat.status.phase in ("Pending", "Initializing"):
        return False
    reported, before = beat.status, ctx.status.progress
    is_first = ctx.record.first_step is None
    if is_first:
        _set_first_step(ctx, reported)
        _set_inputs(ctx, reported.inputs)
    has_advanced = is_first
    if reported.progress is not None:
        steps = 1 if is_first or before is None else reported.progress.step - before.step
        has_advanced = steps > 0
        if steps >= 0:
            told = {"metrics": reported.metrics[:MAX_METRICS], "warnings": reported.warnings, "causes": reported.causes}
            ctx.set_status(progress=reported.progress, links=reported.links, **told)
            _set_healthy(ctx)
    if (progress := ctx.status.progress) is not None:
        # The deadline uses the operator's clock, since the pod's clock may be wrong.
        stepped = timestamp(ctx.now) if has_advanced else before.last_step_time if before else None
        ctx.set_status(progress=progress.model_copy(update={"last_step_time": stepped}))
    _update_checkpoint(ctx, reported.checkpoint, is_first=is_first)
    return has_advanced


def _set_healthy(ctx: ReconcileContext) -> None:
    """Set the condition Healthy by the causes of trouble that the trainer finds; it is unset before the first."""
    if causes := ctx.status.causes:
        ctx.set_condition("Healthy", "False", causes[-1].partition(" ")[0], causes[-1])
    elif ctx.condition("Healthy") is not None:
        ctx.set_condition("Healthy", "True", "NoCauseFound", "The trainer finds no cause of trouble any more.")


def update_last_words(ctx: ReconcileContext) -> None:
    """Copy progress and checkpoint of an attempt that has ended while its pods still save and end."""
    if ctx.record is not None and ctx.record.first_step is not None and update_progress(ctx) and ctx.status.progress:
        ctx.set_record(last_step=ctx.status.progress.step)


def _set_first_step(ctx: ReconcileContext, reported: Status) -> None:
    """Record the number of steps done before this attempt, by its first report, which may come after some new steps."""
    saved, before = reported.checkpoint, ctx.status.progress
    if reported.progress is None:
        first = saved.step if saved else 0
        if before is not None:  # later steps of the earlier attempt are lost
            ctx.set_status(progress=before.model_copy(update={"step": min(before.step, first)}))
    else:
        made, began = parsed(saved.time) if saved else None, parsed(ctx.record.start_time) if ctx.record else None
        known = saved if made and began and made < began else ctx.status.checkpoint
        first = min(known.step if known else 0, reported.progress.step)
    ctx.set_record(first_step=first)


def _set_inputs(ctx: ReconcileContext, reported: Sequence[ReadInput]) -> None:
    """Record what the attempt reads: URIs by the spec and by the input jobs, content as the trainer has found it."""
    known, earlier = {each.name: each for each in reported}, {each.name: each.uri for each in ctx.status.inputs}
    found = []
    for each in read_inputs(ctx.job) if ctx.job else ():
        made, content = ctx.snapshot.inputs.get(each.job or ""), known.get(each.name, each)
        uri = made.output_uri if made and made.output_uri else earlier.get(each.name, each.uri)
        found.append(content.model_copy(update={"uri": uri, "job": each.job}))
    ctx.set_status(inputs=tuple(found))


def _update_checkpoint(ctx: ReconcileContext, saved: SavedState | None, *, is_first: bool) -> None:
    before = ctx.status.checkpoint
    if saved is None or not (is_first or before is None or saved.step >= before.step):
        return
    path = saved.uri.removeprefix("file://")
    inside = path.removeprefix(f"{names.OUTPUT_FOLDER}/")
    if ctx.job is not None and inside != path:  # outside of the pod, the run folder is on its claim (pvc://)
        saved = saved.model_copy(update={"uri": storage.run_folder(ctx.job).below(inside)})
    ctx.set_status(checkpoint=saved)


def is_queued(ctx: ReconcileContext) -> bool:
    """Whether Kueue holds the attempt back, or has taken its quota back before all pods were ready."""
    rayjob, quota = ctx.snapshot.current_rayjob(), ctx.snapshot.quota
    if rayjob is None or rayjob.deleting or ctx.condition_since("ClusterReady") is not None:
        return False
    return rayjob.suspended or (quota is not None and not quota.reserved) or _ending_pod(ctx) is not None


def _ending_pod(ctx: ReconcileContext) -> ObservedPod | None:
    """Return a pod of an earlier admission by Kueue that still has time to end, so it is no lost pod; else None."""
    if ctx.holds("QuotaReserved") or ctx.snapshot.in_line:
        return None
    for pod in observed_attempt.current_pods(ctx.snapshot):
        rest = pod.grace_seconds + cleanup.FORCE_SECONDS - ctx.age(pod.deleting_since) if pod.deleting_since else 0.0
        if ctx.must_wait(rest):
            return pod
    return None


def set_queued(ctx: ReconcileContext) -> None:
    """Set the conditions of an attempt that waits for its quota from Kueue."""
    quota, queue = ctx.snapshot.quota or ObservedQuota(reserved=False), ctx.status.queue or "Kueue's"
    ctx.set_status(head_pod=None)
    evicted = quota.evicted if quota.evicted.isalpha() and quota.evicted.isascii() else ""
    message = quota.message or f"waits to be admitted by queue {queue}"
    if quota.reserved and not evicted and (pod := _ending_pod(ctx)):
        message = f"waits until pod {pod.name} of an earlier admission is gone"
    ctx.set_condition("QuotaReserved", "False", evicted or "Pending", message)
    ctx.set_condition("ClusterReady", "False", QUEUED, "No pods before the quota is reserved.")


def set_quota_reserved(ctx: ReconcileContext) -> None:
    """Set the condition QuotaReserved of an attempt that has its quota, or needs none."""
    held, reserved = ctx.condition("ClusterReady"), ctx.condition("QuotaReserved")
    if ctx.snapshot.quota is not None or (held is not None and held.reason == QUEUED):
        ctx.set_condition("QuotaReserved", "True", "QuotaReserved", "Kueue has admitted it.")
    elif reserved is None or (reserved.status != "True" and (reserved.reason not in LACKS_NODES or _have_nodes(ctx))):
        ctx.set_condition("QuotaReserved", "True", *(IGNORED if ctx.status.queue else NOT_QUEUED))


def _have_nodes(ctx: ReconcileContext) -> bool:
    head, workers = observed_attempt.head_of(ctx.snapshot), observed_attempt.workers_of(ctx.snapshot)
    expected = observed_attempt.expected_workers(ctx.snapshot)
    return head is not None and len(workers) >= expected and all(pod.node for pod in (head, *workers))


def set_cluster_ready(ctx: ReconcileContext) -> None:
    """Set the condition ClusterReady by the state of the pods; once True, it stays so until the attempt ends."""
    if ctx.condition_since("ClusterReady") is not None:
        return
    head, workers = observed_attempt.head_of(ctx.snapshot), observed_attempt.workers_of(ctx.snapshot)
    beat, expected = ctx.snapshot.current_heartbeat(), observed_attempt.expected_workers(ctx.snapshot)
    is_whole = head is not None and len(workers) >= expected
    pods = ([head] if head else []) + list(workers)
    if ctx.snapshot.in_line and _have_nodes(ctx):
        ctx.set_status(reserved=with_sandboxes(held_by(pods), ctx.job, ctx.snapshot, ctx.settings))
    trains = beat is not None and beat.status.phase == "Running"
    if is_whole and (trains or all(pod.ready for pod in pods)):
        ctx.set_condition("ClusterReady", "True", "AllPodsReady", f"{len(pods)} pods are ready.")
        _keep_from_evictions(ctx, pods)
        return
    problem = None if is_whole else _why_pods_are_missing(ctx)
    problem = next(filter(None, (problem, *map(start_problem, pods))), None) or slow_start(ctx)
    reason, message = problem or ("PodsPending", f"{expected + 1} pods are to be ready.")
    ctx.set_condition("ClusterReady", "False", reason, message)


def _keep_from_evictions(ctx: ReconcileContext, pods: Sequence[ObservedPod]) -> None:
    """Add the action that creates the PodDisruptionBudget of the attempt."""
    if rayjob := ctx.snapshot.current_rayjob():
        ctx.require_live("the pods of the attempt are kept from evictions")
        pool = ctx.status.mapping.elastic_pool if ctx.status.mapping else None
        protected = sum(pool is None or each.pool != pool.name for each in pods)
        ctx.actions.append(Create(manifest=disruption_budget(ctx.snapshot.job, rayjob, protected)))


def _why_pods_are_missing(ctx: ReconcileContext) -> tuple[str, str] | None:
    """Return (reason, sentence) why pods are missing; None while they may still come by themselves."""
    rayjob = ctx.snapshot.current_rayjob()
    if rayjob is None:
        return None
    if rayjob.refused:
        return refusal(rayjob.refused)
    waited = ctx.age(max(rayjob.created, ctx.condition_since("QuotaReserved") or rayjob.created))
    if ctx.must_wait(PATIENCE_SECONDS - waited):
        return None
    if not evidence.is_taken_up(rayjob):
        return "KubeRayAway", f"KubeRay has not taken up RayJob {rayjob.name}; see whether its operator runs."
    ctx.requeue_after(LOOK_AGAIN_SECONDS)
    if observed_attempt.current_pods(ctx.snapshot):
        return None
    ctx.require_live("it is not known why no pods are made")
    return refusal(ctx.snapshot.complaint) if ctx.snapshot.complaint else None


def refusal(why: str) -> tuple[str, str]:
    """Return (reason, sentence) of a condition about pods that the API server refused."""
    if evidence.QUOTA in why:
        return "QuotaExceeded", f"A quota of the namespace has no room: {why}"
    return "PodsRefused", f"Pods cannot be made: {why}"


def slow_start(ctx: ReconcileContext) -> tuple[str, str] | None:
    """Return (reason, sentence) of a pod whose containers have waited for long, with its newest event."""
    if (found := observed_attempt.waiting_container(ctx.snapshot)) is None:
        return None
    pod, waiting = found
    if ctx.must_wait(SLOW_START_SECONDS - ctx.age(max(pod.scheduled or pod.created, ctx.snapshot.watching_since))):
        return None
    ctx.require_live("it is not known why a pod does not start")
    ctx.requeue_after(LOOK_AGAIN_SECONDS)
    why = ctx.snapshot.complaint or waiting.waiting_message or "no event says why"
    return conditions.SLOW_START, f"pod {pod.name}: container {waiting.name} waits ({waiting.waiting_reason}): {why}"


def start_problem(pod: ObservedPod) -> tuple[str, str] | None:
    """Return (reason, sentence) of a known problem that keeps a pod from starting; None without a problem."""
    without_room = ("Unschedulable", f"pod {pod.name}: {pod.unschedulable}") if pod.unschedulable else None
    return next((cause[:2] for cause in evidence.problems_of(pod)), without_room)


def set_training(ctx: ReconcileContext) -> None:
    """Set the condition Training by the trainer's last report and its age."""
    beat, record = ctx.snapshot.current_heartbeat(), ctx.record
    limit = max(4 * ctx.settings.status_interval_seconds, SILENCE_SECONDS)
    silence = ctx.age(max(ctx.snapshot.watching_since, beat.received) if beat else ctx.snapshot.watching_since)
    has_trained = record is not None and record.first_step is not None
    if has_trained and silence < limit:
        ctx.requeue_after(max(limit - silence, limit / 4))
    if has_trained and silence >= limit:
        message = "Nothing is heard from the head pod; the attempt ends if that lasts."
        ctx.set_condition("Training", "Unknown", "HeartbeatMissing", message)
    elif beat is not None and beat.status.phase == "Running":
        ctx.set_condition("Training", "True", "Training", f"Attempt {ctx.status.attempt} trains.")
    elif ctx.holds("ClusterReady") and not has_trained:
        message = "The cluster is there; the trainer loads models and data."
        ctx.set_condition("Training", "False", "Initializing", message)


def set_slow(ctx: ReconcileContext, waited: float, limit: int) -> None:
    """Set the condition Slow: True once half of the time limit for a step has passed, else False."""
    if waited >= limit / 2:
        message = f"No step for more than {limit // 2} s; at {limit} s it counts as hung."
        ctx.set_condition("Slow", "True", "NoProgress", message)
    elif ctx.condition("Slow") is not None:
        ctx.set_condition("Slow", "False", "Progressing", "Steps are being made.")
