"""RayJobs and pods that have had their time."""

from __future__ import annotations

from typing import Final

from rlhf_operator import failure
from rlhf_operator.plan import DeletePod, DeleteRayJob
from rlhf_operator.reconcile.turn import Turn
from rlhf_operator.snapshot import PodSeen

FORCE_SECONDS: Final = 300.0
"""Beyond its grace period; only then a pod whose node is silent is taken for dead."""
OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
"""Taint by which an administrator says that a node is off, so that nothing can run there."""


def clear(turn: Turn) -> bool:
    """Delete all RayJobs of the job and the pods that nobody else will; whether nothing is left."""
    delete_rayjobs(turn, but=None)
    for pod in turn.snapshot.pods:
        wait = _until_forced(turn, pod)
        if wait is not None and wait <= 0:
            turn.need_live(f"pod {pod.name} is deleted by force")
            turn.actions.append(DeletePod(name=pod.name, uid=pod.uid))
        if wait is not None:
            turn.again(max(wait, FORCE_SECONDS / 10))
    return not turn.snapshot.pods and not any(each.owned for each in turn.snapshot.rayjobs)


def delete_rayjobs(turn: Turn, *, but: str | None) -> None:
    """Delete the job's RayJobs, except the one of this name."""
    for each in turn.snapshot.rayjobs:
        if each.owned and not each.deleting and each.name != but:
            turn.need_live(f"RayJob {each.name} is deleted")
            turn.actions.append(DeleteRayJob(name=each.name, uid=each.uid))


def _until_forced(turn: Turn, pod: PodSeen) -> float | None:
    """Seconds until a pod is deleted by force; None for a pod whose kubelet will see to it."""
    if pod.deleting_since is None or not pod.node:
        return None
    node = failure.node_of(pod, turn.snapshot)
    is_off = node is not None and any(key == OUT_OF_SERVICE for key, _, _ in node.taints)
    if is_off or failure.node_is_gone(pod, turn.snapshot):
        return 0.0
    is_silent = not node.ready if node is not None else pod.phase == "Unknown" or bool(pod.disruption)
    if not is_silent:
        return None
    return pod.grace_seconds + FORCE_SECONDS - turn.age(max(pod.deleting_since, turn.snapshot.watching_since))
