"""What is seen of an attempt, written into the status."""

from __future__ import annotations

from typing import Final

from rlhf_api.status import SavedState, Status
from rlhf_operator import conditions, failure, names, resources
from rlhf_operator.reconcile import cleanup
from rlhf_operator.reconcile.turn import BEFORE_AN_ATTEMPT, Turn
from rlhf_operator.snapshot import Heartbeat, PodSeen
from rlhf_operator.times import parsed, timestamp

MOST_METRICS: Final = 100
NOT_QUEUED: Final = ("NotQueued", "The job names no queue.")
IGNORED: Final = ("QueueIgnored", "No Kueue manages RayJobs here: the attempt was not held back.")
QUEUED: Final = "Queued"
"""Reason of ClusterReady=False while Kueue keeps the RayJob suspended."""
SILENCE_SECONDS: Final = 60.0
"""At least so long, and four readings, nothing is heard before Training counts as Unknown."""


def begin(turn: Turn) -> None:
    """The RayJob is there for the first time: from now on its absence means something."""
    rayjob = turn.snapshot.current_rayjob()
    if rayjob is not None and turn.status.ray_job_name != rayjob.name:
        turn.set(ray_job_name=rayjob.name)
        turn.set_record(start_time=timestamp(rayjob.created))
    head = failure.head_of(turn.snapshot)
    if head is not None and turn.status.head_pod is None:
        turn.set(head_pod=head.name)
    for kind in BEFORE_AN_ATTEMPT:  # missing only from a status that was lost
        if not conditions.holds(turn.status.conditions, kind):
            turn.say(kind, "True", kind, f"Attempt {turn.status.attempt} proves it.")


def heartbeat(turn: Turn) -> Heartbeat | None:
    """The trainer's latest words, if they are about the current attempt."""
    beat = turn.snapshot.heartbeat
    return beat if beat is not None and beat.attempt == turn.status.attempt else None


def hear(turn: Turn) -> bool:
    """Copy what the trainer reports; whether it has come further."""
    beat = heartbeat(turn)
    if beat is None or turn.record is None or beat.status.phase in ("Pending", "Initializing"):
        return False
    told, before = beat.status, turn.status.progress
    is_first = turn.record.first_step is None
    if is_first:
        first = _first_step(turn, told)
        turn.set_record(first_step=first)
        if before is not None and told.progress is None:
            turn.set(progress=before.model_copy(update={"step": min(before.step, first)}))
    has_advanced = is_first
    if told.progress is not None and (is_first or before is None or told.progress.step >= before.step):
        has_advanced = is_first or before is None or told.progress.step > before.step
        turn.set(progress=told.progress, metrics=told.metrics[:MOST_METRICS])
    if (progress := turn.status.progress) is not None:
        # By the operator's clock, as the deadline is: the pod's may be wrong.
        stepped = timestamp(turn.now) if has_advanced else before.last_step_time if before else None
        turn.set(progress=progress.model_copy(update={"last_step_time": stepped}))
    _hear_of_checkpoint(turn, told.checkpoint, is_first=is_first)
    return has_advanced


def _first_step(turn: Turn, told: Status) -> int:
    """Steps that were finished before this attempt, by its first report; that may come after some steps."""
    saved, began = told.checkpoint, parsed(turn.record.start_time) if turn.record else None
    made = parsed(saved.time) if saved else None
    if saved is not None and (told.progress is None or (made and began and made < began)):
        return min(saved.step, told.progress.step) if told.progress else saved.step
    known = turn.status.checkpoint.step if turn.status.checkpoint else 0
    return min(known, told.progress.step) if told.progress else 0


def _hear_of_checkpoint(turn: Turn, saved: SavedState | None, *, is_first: bool) -> None:
    before = turn.status.checkpoint
    if saved is None or not (is_first or before is None or saved.step >= before.step):
        return
    here = saved.model_copy(update={"uri": _uri(turn, saved.uri)})
    if here == before:
        return
    turn.set(checkpoint=here)
    if before is None or here.step > before.step:
        turn.tell("Normal", "Checkpoint", f"Step {here.step} is saved at {here.uri}.")


def _uri(turn: Turn, uri: str) -> str:
    """Where a file of the run folder is, for somebody outside the pod."""
    path = uri.removeprefix("file://")
    inside = path.removeprefix(f"{names.OUTPUT_FOLDER}/")
    if turn.job is None or inside == path:
        return uri
    return f"{resources.output_uri(turn.job).removesuffix(f'/{turn.job.name}/model')}/{inside}"


def is_queued(turn: Turn) -> bool:
    """Whether Kueue keeps the attempt, or has taken it back before it was whole."""
    rayjob, quota = turn.snapshot.current_rayjob(), turn.snapshot.quota
    if rayjob is None or rayjob.deleting or turn.became("ClusterReady") is not None:
        return False
    return rayjob.suspended or (quota is not None and not quota.reserved) or _leaving(turn) is not None


def _leaving(turn: Turn) -> PodSeen | None:
    """A pod of an earlier admission that has time left to end: beside those of the next one it is no loss."""
    if conditions.holds(turn.status.conditions, "QuotaReserved"):
        return None
    for pod in failure.current_pods(turn.snapshot):
        rest = pod.grace_seconds + cleanup.FORCE_SECONDS - turn.age(pod.deleting_since) if pod.deleting_since else 0.0
        if rest > 0:
            turn.again(rest)
            return pod
    return None


def queue(turn: Turn) -> None:
    """The attempt waits for its quota."""
    quota, name = turn.snapshot.quota, turn.status.queue or "Kueue's"
    turn.set(head_pod=None)
    evicted = quota.evicted if quota and quota.evicted.isalpha() and quota.evicted.isascii() else ""
    message = (quota.message if quota else "") or f"waits to be admitted by queue {name}"
    if quota and quota.reserved and not evicted and (pod := _leaving(turn)):
        message = f"waits until pod {pod.name} of an earlier admission is gone"
    turn.say("QuotaReserved", "False", evicted or "Pending", message)
    turn.say("ClusterReady", "False", QUEUED, "No pods before the quota is reserved.")


def reserve(turn: Turn) -> None:
    """The attempt has its quota, or needs none."""
    held = conditions.found(turn.status.conditions, "ClusterReady")
    if turn.snapshot.quota is not None or (held is not None and held.reason == QUEUED):
        turn.say("QuotaReserved", "True", "QuotaReserved", "Kueue has admitted it.")
    elif not conditions.holds(turn.status.conditions, "QuotaReserved"):
        turn.say("QuotaReserved", "True", *(IGNORED if turn.status.queue else NOT_QUEUED))


def run(turn: Turn) -> None:
    """Say how far the pods and the trainer are."""
    if turn.became("ClusterReady") is None:
        _cluster(turn)
    _training(turn)


def _cluster(turn: Turn) -> None:
    head, workers = failure.head_of(turn.snapshot), failure.workers_of(turn.snapshot)
    mapping, beat = turn.status.mapping, heartbeat(turn)
    expected = sum(pool.nodes for pool in mapping.pools) if mapping else 0
    is_whole = head is not None and len(workers) >= expected
    trains = beat is not None and beat.status.phase == "Running"
    pods = [*([head] if head else []), *workers]
    if is_whole and (trains or all(pod.ready for pod in pods)):
        turn.say("ClusterReady", "True", "AllPodsReady", f"{len(pods)} pods are ready.")
        return
    reason, message = next(
        filter(None, map(_hindrance, pods)), ("PodsPending", f"{expected + 1} pods are to be ready.")
    )
    turn.say("ClusterReady", "False", reason, message)


def _hindrance(pod: PodSeen) -> tuple[str, str] | None:
    if pod.unschedulable:
        return "Unschedulable", f"pod {pod.name}: {pod.unschedulable}"
    for each in pod.containers:
        if each.waiting_reason in failure.PULLING:
            return "ImagePull", f"pod {pod.name}: {each.waiting_message or each.waiting_reason}"
        if each.waiting_reason == "CreateContainerConfigError":
            return "ConfigError", f"pod {pod.name}: {each.waiting_message or each.waiting_reason}"
    return None


def _training(turn: Turn) -> None:
    beat, record = heartbeat(turn), turn.record
    limit = max(4 * turn.settings.status_interval_seconds, SILENCE_SECONDS)
    silence = turn.age(max(turn.snapshot.watching_since, beat.received) if beat else turn.snapshot.watching_since)
    has_trained = record is not None and record.first_step is not None
    if has_trained and silence < limit:
        turn.again(max(limit - silence, limit / 4))
    if has_trained and silence >= limit:
        message = "Nothing is heard from the head pod; the attempt ends if that lasts."
        turn.say("Training", "Unknown", "HeartbeatMissing", message)
    elif beat is not None and beat.status.phase == "Running":
        turn.say("Training", "True", "Training", f"Attempt {turn.status.attempt} trains.")
    elif conditions.holds(turn.status.conditions, "ClusterReady") and not has_trained:
        turn.say("Training", "False", "Initializing", "The cluster is there; the trainer loads models and data.")


def stalled(turn: Turn, waited: float, limit: int) -> None:
    """Warn when half of the time for a step has passed."""
    if waited >= limit / 2:
        half = limit // 2
        turn.say("Stalled", "True", "NoProgress", f"No step for more than {half} s; at {limit} s it counts as hung.")
    elif conditions.found(turn.status.conditions, "Stalled") is not None:
        turn.say("Stalled", "False", "Progressing", "Steps are being made.")
