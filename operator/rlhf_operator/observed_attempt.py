"""The current attempt as a snapshot shows it: its pods, their nodes, and the end of the trainer."""

import re
from collections.abc import Collection
from datetime import datetime
from typing import Final

from rlhf_api.status import MappedPool
from rlhf_operator import names
from rlhf_operator.snapshot import ObservedContainer, ObservedNode, ObservedPod, ObservedRayJob, Snapshot

OWN_CONTAINERS: Final = frozenset({names.HEAD_CONTAINER, names.WORKER_CONTAINER})
EXIT_CODE: Final = re.compile(r"exit code:? (-?\d{1,9})\b")


def current_pods(snapshot: Snapshot) -> tuple[ObservedPod, ...]:
    """Return the pods that the current attempt needs: all but the extra pods of an elastic pool."""
    mapping = snapshot.job.status.mapping
    extra = elastic_pods(snapshot)[mapping.elastic_pool.nodes :] if mapping and mapping.elastic_pool else []
    return tuple(pod for pod in snapshot.pods if pod.attempt == snapshot.job.status.attempt and pod not in extra)


def elastic_pods(snapshot: Snapshot) -> list[ObservedPod]:
    """Return the elastic pool's pods of the current attempt, in order: not leaving, ready, bound to a node, oldest."""
    status = snapshot.job.status
    if not (status.mapping and (pool := status.mapping.elastic_pool)):
        return []
    pods = (each for each in snapshot.pods if (each.attempt, each.pool) == (status.attempt, pool.name))
    return sorted(pods, key=lambda pod: (is_leaving(pod, pool), not pod.ready, not pod.node, pod.created, pod.name))


def is_leaving(pod: ObservedPod, pool: MappedPool) -> bool:
    """Whether a pod of an elastic pool has ended, or is about to end."""
    return pod.name in pool.leaving_pods or bool(how_ended(pod))


def workers_of(snapshot: Snapshot) -> tuple[ObservedPod, ...]:
    return tuple(pod for pod in current_pods(snapshot) if pod.role == names.WORKER)


def expected_workers(snapshot: Snapshot, without: Collection[str] = ()) -> int:
    """Return the number of worker pods of the mapping; 0 without one. without: names of pools that do not count."""
    mapping = snapshot.job.status.mapping
    return sum(pool.nodes for pool in mapping.pools if pool.name not in without) if mapping else 0


def head_of(snapshot: Snapshot) -> ObservedPod | None:
    """Return the head pod of the current attempt; of two head pods the older one, in which the trainer ran."""
    heads = [pod for pod in current_pods(snapshot) if pod.role == names.CONTROLLER]
    return min(heads, key=lambda pod: (pod.created, pod.name), default=None)


def head_can_answer(snapshot: Snapshot) -> bool:
    """Whether a head pod can still be asked for the trainer's last status."""
    head = head_of(snapshot)
    return head is not None and head.deleting_since is None and head.phase == "Running"


def named_pod(snapshot: Snapshot) -> ObservedPod | None:
    """Return the pod that the trainer blames; with hostNetwork the trainer knows only the pod's node."""
    beat = snapshot.current_heartbeat()
    named = beat.status.last_failure.pod if beat and beat.status.last_failure else None
    return next((pod for pod in current_pods(snapshot) if named and named in (pod.name, pod.node)), None)


def waiting_container(snapshot: Snapshot) -> tuple[ObservedPod, ObservedContainer] | None:
    """Return the first (pod, container) that waits on its node: of the current attempt's head, workers, or a reader."""
    pods = sorted(current_pods(snapshot), key=lambda pod: (pod.role != names.CONTROLLER, pod.name))
    every = (*pods, *snapshot.readers)
    waiting = ((pod, each) for pod in every if pod.node for each in pod.containers if each.waiting_reason)
    return next(waiting, None)


def node_of(pod: ObservedPod, snapshot: Snapshot) -> ObservedNode | None:
    """Return the node of a pod; None if the node is unknown or gone."""
    return next((node for node in snapshot.nodes or () if node.name == pod.node), None)


def silent_since(pod: ObservedPod, snapshot: Snapshot) -> datetime | None:
    """Return the time since which a pod's node has not been ready; None if it is ready, or its state is unknown."""
    if (node := node_of(pod, snapshot)) is None:
        return pod.silent_since
    return None if node.ready else node.not_ready_since or pod.not_ready_since or pod.created


def node_is_gone(pod: ObservedPod, snapshot: Snapshot) -> bool:
    """Whether a pod was bound to a node that has been removed."""
    return bool(pod.node) and snapshot.nodes is not None and node_of(pod, snapshot) is None


def ray_job_failed(rayjob: ObservedRayJob | None) -> bool:
    """Whether KubeRay reports that the Ray job has ended without success."""
    if rayjob is None or rayjob.job_status == "SUCCEEDED":
        return False
    is_over = rayjob.deployment_status in ("Failed", "ValidationFailed", "Complete")
    return is_over or rayjob.job_status in ("FAILED", "STOPPED")


def exit_code(snapshot: Snapshot) -> int | None:
    """Return the trainer's exit code: from its process, else from its last status, else from Ray's message."""
    if (code := _reported_code(snapshot)) is None:
        return None
    code = 128 - code if code < 0 else code  # a signal: -9 in Python becomes 137 as in a shell
    return code if code <= 255 else None


def _reported_code(snapshot: Snapshot) -> int | None:
    if (beat := snapshot.current_heartbeat()) is not None:
        if beat.complete and beat.exit_code is not None:
            return beat.exit_code
        if beat.status.last_failure and beat.status.last_failure.exit_code is not None:
            return beat.status.last_failure.exit_code
    rayjob = snapshot.current_rayjob()
    match = EXIT_CODE.search(rayjob.message) if rayjob and ray_job_failed(rayjob) else None
    return int(match[1]) if match else None


def has_failed(snapshot: Snapshot) -> bool:
    """Whether the trainer has exited with an error, or its Ray job has failed."""
    beat = snapshot.current_heartbeat()
    has_exited = exit_code(snapshot) not in (None, 0) and beat is not None and beat.complete
    return has_exited or ray_job_failed(snapshot.current_rayjob())


def trainer_message(snapshot: Snapshot) -> str:
    """Return the message of the failure that the trainer wrote last; empty without one."""
    beat = snapshot.current_heartbeat()
    return beat.status.last_failure.message if beat and beat.status.last_failure else ""


def how_ended(pod: ObservedPod) -> str:
    """Return how a pod ended; empty if it has not ended."""
    if pod.deleting_since is not None:
        return "was deleted"
    if pod.phase in ("Failed", "Succeeded"):
        return f"ended ({pod.phase}): {pod.reason} {pod.message}".rstrip(": ")
    own = (each for each in pod.containers if each.name in OWN_CONTAINERS)
    ended = next((each for each in own if each.exit_code is not None and not each.running), None)
    return f"ended: container {ended.name}, exit code {ended.exit_code}" if ended else ""


def survivable_pools(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the names of pools whose loss a running trainer survives: rollout-only pools; none with rollout.stream."""
    mapping, rollout = snapshot.job.status.mapping, snapshot.job.spec.get("rollout") or {}
    if not mapping or rollout.get("stream") or exit_code(snapshot) is not None:
        return ()
    return tuple(pool.name for pool in mapping.pools if pool.models == ("rollout",))
