"""The observed objects that one reconcile pass decides on, as plain values without a client library."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from rlhf_api.files import strings_in
from rlhf_api.quantities import amount
from rlhf_api.status import Attempt, Reserved, Status
from rlhf_operator import names

Document = Mapping[str, Any]
"""A part of a Kubernetes object as JSON types."""
NodeRequest = tuple[str, str | None, frozenset[str | None]]
"""Request that decides which nodes a job may use: (spec.runtime as JSON, device, GPU types)."""


@dataclass(frozen=True, kw_only=True)
class ObservedJob:
    """RLHFJob, as the operator last observed it."""

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    """Version of the job; a write of the status is refused unless it is still current."""
    created: datetime
    deleting: bool
    labels: Mapping[str, str]
    spec: Document
    status: Status
    """Status of the job without unreadable fields; empty before the first pass."""
    lost_fields: tuple[str, ...] = ()
    """Paths in the spec that somebody set, and that the API server has dropped since: its CRD does not know them."""

    @cached_property
    def node_request(self) -> NodeRequest:
        """Request for nodes; jobs with equal requests may use the same nodes."""
        mapping = self.status.mapping
        gpus = frozenset(pool.gpu for pool in mapping.pools) if mapping else frozenset({None})
        runtime = json.dumps(self.spec.get("runtime", {}), sort_keys=True)
        return runtime, mapping.device if mapping else None, gpus

    @property
    def algorithm(self) -> str:
        """Name of the algorithm in the spec; empty without one."""
        named = self.spec.get("algorithm")
        name = named.get("name") if isinstance(named, Mapping) else None
        return name if isinstance(name, str) else ""

    @property
    def output_uri(self) -> str:
        """URI of the job's output, pvc://claim/path; empty until the job has succeeded."""
        return self.status.output.uri if self.status.output else ""

    @property
    def is_paused(self) -> bool:
        """Whether the trainer has paused the job (spec.watch, spec.checkpoint), and the spec is still as it was."""
        return self.status.paused_generation == self.generation

    def without_extras(self) -> ObservedJob:
        """Return the job without the room of its elastic pool's extra nodes, which any waiting job may get."""
        kept = tuple(each for each in self.status.reserved if not each.extra)
        return replace(self, status=self.status.model_copy(update={"reserved": kept}))


@dataclass(frozen=True, kw_only=True)
class ObservedRayJob:
    """State of a RayJob with the job's label, or the name of its current or next attempt, but perhaps another owner."""

    name: str
    uid: str
    attempt: int
    """Number of the attempt; 0 if its label is missing or wrong."""
    owned: bool
    """Whether the job controls the RayJob, by its uid."""
    created: datetime
    deleting: bool
    suspended: bool = False
    deployment_status: str = ""
    """KubeRay's jobDeploymentStatus: Initializing, Running, Complete, Failed, Suspended, ..."""
    job_status: str = ""
    """State of the job in Ray: PENDING, RUNNING, SUCCEEDED, FAILED, STOPPED."""
    message: str = ""
    started: datetime | None = None
    """Time at which KubeRay started to process the RayJob."""
    cluster: str = ""
    """Name of the RayCluster that KubeRay made for the RayJob."""
    refused: str = ""
    """Reason of the API server for refusing pods of the RayJob to KubeRay; empty if no pod was refused."""


@dataclass(frozen=True, kw_only=True)
class ObservedContainer:
    """State of a container or init container of a pod, as the operator last observed it."""

    name: str
    running: bool = False
    waiting_reason: str = ""
    """Reason why the container waits: ImagePullBackOff, CreateContainerConfigError, ..."""
    waiting_message: str = ""
    exit_code: int | None = None
    ended_reason: str = ""
    """Reason why the container has ended: OOMKilled, Error, Completed."""
    last_words: str = ""
    """Termination message of a container that reads shapes, makes the run folder, or is a sandbox that never ran."""


@dataclass(frozen=True, kw_only=True)
class ObservedPod:
    """State of a pod, as the operator last observed it; without a job's label it has only node, requests and phase."""

    name: str
    uid: str
    attempt: int
    role: str
    """Role of the pod: names.CONTROLLER, names.WORKER, names.READER or names.SANDBOX."""
    pool: str = ""
    phase: str = "Pending"
    ready: bool = False
    node: str = ""
    ip: str = ""
    reason: str = ""
    """Reason of a pod that failed as a whole: Evicted, NodeLost, ..."""
    message: str = ""
    disruption: str = ""
    """Reason of the condition DisruptionTarget: PreemptionByScheduler, DeletionByTaintManager, ..."""
    unschedulable: str = ""
    """Message of the pod's condition PodScheduled=False."""
    scheduled: datetime | None = None
    created: datetime
    not_ready_since: datetime | None = None
    silent_since: datetime | None = None
    """Time at which the control plane declared a running pod not ready, because the kubelet of its node is silent."""
    deleting_since: datetime | None = None
    grace_seconds: int = 30
    requests: Mapping[str, int] = field(default_factory=dict)
    """Amounts that the pod requests, in the units of `amounts`; empty once the pod has ended."""
    containers: tuple[ObservedContainer, ...] = ()

    @property
    def was_disrupted(self) -> bool:
        """Whether the pod was disrupted, failed as a whole, or had a container killed for its memory."""
        return bool(self.disruption or self.reason) or any(each.ended_reason == "OOMKilled" for each in self.containers)

    def is_out_of_memory(self, containers: Collection[str]) -> bool:
        """Whether one of these containers of the pod was killed for its memory."""
        return any(each.ended_reason == "OOMKilled" and each.name in containers for each in self.containers)


@dataclass(frozen=True, kw_only=True)
class ObservedNode:
    """State of a node, or of one that a node group may still add: the facts that mapper and failures need."""

    name: str
    ready: bool
    not_ready_since: datetime | None = None
    """Time at which the node ceased to be ready; None if it is ready, or does not say."""
    schedulable: bool
    labels: Mapping[str, str]
    taints: tuple[tuple[str, str, str], ...] = ()
    """Taints of the node: (key, value, effect)."""
    allocatable: Mapping[str, str] = field(default_factory=dict)
    """Allocatable quantities of the node (cpu, memory and devices), as Kubernetes writes them."""
    turn: int = 0
    """Position among the nodes that groups may add, in the order in which pods are planned on them; 0: it exists."""
    spot: bool = False
    """Whether the node is one that a group may add, and that the cloud may take back."""

    @cached_property
    def room(self) -> Counter[str]:
        """Allocatable amounts of the node, in the units of `amounts`; callers must not change them."""
        return amounts(self.allocatable)

    @property
    def group(self) -> str:
        """Name of the node group that may add the node; empty for a node that exists."""
        return names.group_of(self.name)


@dataclass(frozen=True, kw_only=True)
class ObservedClaim:
    """State of a PersistentVolumeClaim that the job names or that was made for it."""

    name: str
    owned: bool = False
    """Whether the claim is deleted with the job."""
    kept_for: str = ""
    """Name of the job for which an operator made the claim, if the claim outlives that job."""
    maker: str = ""
    """uid of the job for which an operator made the claim."""
    size: str = ""
    """Size of the claim, or the requested size if it is unbound; empty if it is unreadable or nominal."""

    def made_for(self, job: ObservedJob) -> bool:
        """Whether the operator made the claim for this job, or for an earlier job of the same name."""
        return self.owned or self.kept_for == job.name


@dataclass(frozen=True, kw_only=True)
class ObservedQuota:
    """State of Kueue's Workload of an attempt's RayJob."""

    reserved: bool
    evicted: str = ""
    """Reason of an eviction by Kueue: Preempted, PodsReadyTimeout, ..."""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Last answer to /status.json by the head pod of the current attempt."""

    attempt: int
    received: datetime
    status: Status
    """Status that the trainer wrote during this attempt; empty before it wrote one."""
    exit_code: int | None = None
    complete: bool = False
    """Whether the trainer's process has ended, as the head pod reports."""


RefusalReason = Literal["CreateRefused", "NameConflict"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Refusal of an object that the operator tried to make for the job."""

    reason: RefusalReason
    message: str


Capability = Literal["kuberay", "kueue", "nodes"]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that a decision about one job depends on, besides the time."""

    job: ObservedJob
    rayjobs: tuple[ObservedRayJob, ...] = ()
    pods: tuple[ObservedPod, ...] = ()
    lost_pods: tuple[ObservedPod, ...] = ()
    """Disrupted pods of the current attempt that are deleted, as they were last observed; none of an elastic pool."""
    readers: tuple[ObservedPod, ...] = ()
    """Pods that read the shapes of models for the job; `pods` does not contain them."""
    sandboxes: tuple[ObservedPod, ...] = ()
    """Pods that run code of the model, of any attempt; `pods` does not contain them."""
    inputs: Mapping[str, ObservedJob] = field(default_factory=dict)
    """Existing input jobs by name: the jobs that the spec names by job://, and the input jobs of these jobs."""
    claims: Mapping[str, ObservedClaim] = field(default_factory=dict)
    """Existing claims by name: those in the spec or in an input job's output, and the one made for the job."""
    quota: ObservedQuota | None = None
    heartbeat: Heartbeat | None = None
    measured: tuple[Attempt, ...] = ()
    """Newest attempt with measured steps of each other job of the namespace; empty if the pass read only the cache."""
    nodes: tuple[ObservedNode, ...] | None = None
    """Nodes of the cluster and those that node groups may still add; None if the operator may not list nodes, so that
    it relies on spec.resources.
    """
    unusable_groups: tuple[str, ...] = ()
    """Sentences on the node groups of autoscalers on which no job is planned."""
    claimable_gpus: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Number of GPUs that pods can have only by resource claims (DRA), by node and driver; no job may use them."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Priority of pods by PriorityClass; the key "" stands for pods without one."""
    taken: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Amounts on each node that others hold: requests of their pods, and room reserved by other jobs."""
    held_by_jobs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Amounts within `taken` that other RLHFJobs hold, and so will give back."""
    line: tuple[ObservedJob, ...] = ()
    """Other jobs of all namespaces that wait for room, or may do so after their first pass."""
    pausing: tuple[ObservedJob, ...] = ()
    """Other jobs of all namespaces that wait for the time of their next attempt, and hold no room."""
    holders: tuple[ObservedJob, ...] = ()
    """Other jobs of all namespaces that hold room in the operator's line."""
    capabilities: frozenset[Capability] = frozenset({"kuberay"})
    refused: Refusal | None = None
    """Refusal of an object in the job's last pass, by the API server or because another owner has it; None if none."""
    complaint: str = ""
    """Newest event about a pod of the job that waits to start, or warning about an object of the job that lacks pods;
    empty if the pass read only the cache.
    """
    watching_since: datetime
    """Begin of the operator's watch: absence and silence before this time prove nothing."""
    fresh: bool = False
    """Whether job and RayJobs were read from the server in this pass, and not from the cache."""
    alone: bool = False
    """Whether the pass holds the lock of reservations: meanwhile no other job can reserve room."""

    def in_queue(self, job: ObservedJob) -> bool:
        """Whether Kueue decides when a job may begin: the job has the label of a queue, and Kueue is installed."""
        return names.QUEUE in job.labels and "kueue" in self.capabilities

    @property
    def in_line(self) -> bool:
        """Whether the operator's own line decides when the job may begin, and not Kueue."""
        return self.nodes is not None and not self.in_queue(self.job)

    def taken_by_foreign_pods(self) -> dict[str, Counter[str]]:
        """Return the amounts that would stay taken on each node if all other jobs had ended."""
        return {node: Counter(taken) - Counter(self.held_by_jobs.get(node, {})) for node, taken in self.taken.items()}

    def taken_only_by(self, jobs: Iterable[ObservedJob]) -> Snapshot:
        """Return the snapshot in which only foreign pods and the reserved room of these jobs are taken."""
        foreign = replace(self, taken=self.taken_by_foreign_pods())
        return foreign.also_taken(reserved for job in jobs for reserved in job.status.reserved)

    def also_taken(self, room: Iterable[Reserved]) -> Snapshot:
        """Return the snapshot with this room taken, too."""
        taken = {node: Counter(held) for node, held in self.taken.items()}
        for each in room:
            taken[each.node] = taken.get(each.node, Counter[str]()) + each.amounts
        return replace(self, taken=taken)

    def existing(self) -> Snapshot:
        """Return the snapshot without the nodes that groups may still add."""
        return self.without({each.name for each in self.nodes or () if each.group})

    def without(self, nodes: Collection[str]) -> Snapshot:
        left = None if self.nodes is None else tuple(each for each in self.nodes if each.name not in nodes)
        return replace(self, nodes=left)

    def current_rayjob(self) -> ObservedRayJob | None:
        """Return the job's own RayJob of the attempt that the status names; None if there is none."""
        number = self.job.status.attempt
        return next((each for each in self.rayjobs if each.owned and each.attempt == number), None)

    def current_heartbeat(self) -> Heartbeat | None:
        """Return the trainer's latest heartbeat; None if it is not about the current attempt."""
        beat = self.heartbeat
        return beat if beat is not None and beat.attempt == self.job.status.attempt else None


def amounts(quantities: Mapping[str, Any]) -> Counter[str]:
    """Return quantities as integers, rounded up: thousandths of CPUs, bytes, devices; other values are left out."""
    found = Counter[str]()
    for name, quantity in quantities.items():
        with suppress(ValueError):  # a pod template may hold numbers
            found[name] = math.ceil(amount(str(quantity)) * (1000 if name == "cpu" else 1))
    return found


def requests_of(pod: Document) -> Counter[str]:
    """Return a pod's requests by resource: the larger of what it needs to start and to run, plus overhead.

    To start, an init container runs beside the sidecars before it; to run, all containers and sidecars do.
    """

    def requested(container: Document) -> Counter[str]:
        # As in Kubernetes, a container with a limit and no request requests its limit.
        resources = container.get("resources", {})
        return amounts({**resources.get("limits", {}), **resources.get("requests", {})})

    together, starting = Counter[str](), Counter[str]()
    for each in pod.get("initContainers", ()):
        if each.get("restartPolicy") == "Always":
            together.update(requested(each))
        else:
            starting |= together + requested(each)
    for each in pod["containers"]:
        together.update(requested(each))
    together |= starting
    together.update(amounts(pod.get("overhead", {})))
    return together


def inputs_of(spec: Document) -> set[str]:
    """Return the names of the jobs that a spec's models and data come from (job://), even if the spec is wrong."""
    read = [spec.get(part) for part in ("algorithm", "models", "data", "evaluation")]
    return {uri.removeprefix("job://") for _, uri in strings_in(read) if uri.startswith("job://")}


def claims_named(spec: Document) -> set[str]:
    """Return the names of the claims that a spec names (pvc://claim/...); the operator makes none of them."""
    parts = [part for field, part in spec.items() if field != "runtime"]
    return {uri.removeprefix("pvc://").split("/")[0] for _, uri in strings_in(parts) if uri.startswith("pvc://")}
