"""The observed objects that one reconcile pass decides on, as plain values without a client library."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from rlhf_api.quantities import amount
from rlhf_api.status import Attempt, Status
from rlhf_operator import names

Document = Mapping[str, Any]
"""A part of a Kubernetes object as JSON types."""
NodeRequest = tuple[str, str | None, frozenset[str | None]]
"""Request that decides which nodes a job may use: (spec.runtime as JSON, device, GPU types)."""


@dataclass(frozen=True, kw_only=True)
class ObservedJob:
    """The RLHFJob."""

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    """Every write of the status is on condition that this still holds."""
    created: datetime
    deleting: bool
    labels: Mapping[str, str]
    spec: Document
    status: Status
    """Empty before the first pass, and where what stands there cannot be read."""

    @cached_property
    def node_request(self) -> NodeRequest:
        """Request for nodes; jobs with equal requests may use the same nodes."""
        mapping = self.status.mapping
        gpus = frozenset(pool.gpu for pool in mapping.pools) if mapping else frozenset({None})
        runtime = json.dumps(self.spec.get("runtime", {}), sort_keys=True)
        return runtime, mapping.device if mapping else None, gpus


@dataclass(frozen=True, kw_only=True)
class ObservedRayJob:
    """A RayJob with the job's label, or with the name that its next attempt will have, whoever owns it."""

    name: str
    uid: str
    attempt: int
    """0 where the label is missing or wrong."""
    owned: bool
    """Whether the job's uid is that of its owner."""
    created: datetime
    deleting: bool
    suspended: bool = False
    """Kueue has not admitted it."""
    deployment_status: str = ""
    """KubeRay's jobDeploymentStatus: Initializing, Running, Complete, Failed, Suspended, ..."""
    job_status: str = ""
    """Ray's own word: PENDING, RUNNING, SUCCEEDED, FAILED, STOPPED."""
    message: str = ""
    started: datetime | None = None
    """Time at which KubeRay took the RayJob up."""
    refused: str = ""
    """Answer of the API server that refused KubeRay a pod; empty if no pod was refused."""


@dataclass(frozen=True, kw_only=True)
class ObservedContainer:
    """A container of a pod, init containers too."""

    name: str
    running: bool = False
    waiting_reason: str = ""
    """ImagePullBackOff, CreateContainerConfigError, ..."""
    waiting_message: str = ""
    exit_code: int | None = None
    """Exit code of a container that has ended."""
    ended_reason: str = ""
    """OOMKilled, Error, Completed."""
    last_words: str = ""
    """Termination message, for a reader only."""


@dataclass(frozen=True, kw_only=True)
class ObservedPod:
    """A pod with the job's label."""

    name: str
    uid: str
    attempt: int
    role: str
    """names.CONTROLLER, names.WORKER or names.READER."""
    pool: str = ""
    """Pool of a worker."""
    phase: str = "Pending"
    """Kubernetes' word: Pending, Running, Succeeded, Failed, Unknown."""
    ready: bool = False
    node: str = ""
    ip: str = ""
    reason: str = ""
    """Reason of a pod that failed as a whole: Evicted, NodeLost, ..."""
    message: str = ""
    disruption: str = ""
    """Reason of the condition DisruptionTarget: PreemptionByScheduler, DeletionByTaintManager, ..."""
    unschedulable: str = ""
    """Message of the condition PodScheduled=False."""
    scheduled: datetime | None = None
    """Time at which the pod got its node."""
    created: datetime
    not_ready_since: datetime | None = None
    deleting_since: datetime | None = None
    grace_seconds: int = 30
    requests: Mapping[str, int] = field(default_factory=dict)
    """Requests on its node, in the units of `amounts`; empty once the pod has ended."""
    containers: tuple[ObservedContainer, ...] = ()

    @property
    def was_disrupted(self) -> bool:
        """Whether the pod shows that something was done to it."""
        return bool(self.disruption or self.reason) or any(each.ended_reason == "OOMKilled" for each in self.containers)

    def is_out_of_memory(self, containers: Collection[str]) -> bool:
        """Whether one of these containers was killed for its memory."""
        return any(each.ended_reason == "OOMKilled" and each.name in containers for each in self.containers)


@dataclass(frozen=True, kw_only=True)
class ObservedNode:
    """A node: what the mapper and the classification of failures need to know."""

    name: str
    ready: bool
    schedulable: bool
    labels: Mapping[str, str]
    taints: tuple[tuple[str, str, str], ...] = ()
    """(key, value, effect)."""
    allocatable: Mapping[str, str] = field(default_factory=dict)
    """Quantities of cpu, memory and devices, as Kubernetes writes them."""

    @cached_property
    def room(self) -> Counter[str]:
        """Allocatable amounts in the units of `amounts`; must not be changed."""
        return amounts(self.allocatable)


@dataclass(frozen=True, kw_only=True)
class ObservedInput:
    """An RLHFJob of the namespace whose output this job reads."""

    name: str
    algorithm: str = ""
    phase: str = ""
    output_uri: str = ""
    """pvc://claim/path once it has succeeded."""
    spec: Document = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ObservedClaim:
    """A PersistentVolumeClaim that the job names or that was made for it."""

    name: str
    owned: bool = False
    """Whether the claim is deleted with the job."""
    kept_for: str = ""
    """Name of the job for which an operator made the claim, if the claim outlives that job."""
    maker: str = ""
    """uid of the job for which an operator made it."""
    size: str = ""
    """Size, or requested size of an unbound claim; empty if it is unreadable or nominal."""

    def made_for(self, job: ObservedJob) -> bool:
        """Whether the job, or an earlier one of its name, has it from the operator."""
        return self.owned or self.kept_for == job.name


@dataclass(frozen=True, kw_only=True)
class ObservedQuota:
    """Kueue's Workload of an attempt's RayJob."""

    reserved: bool
    evicted: str = ""
    """Reason of an eviction: Preempted, PodsReadyTimeout, ..."""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Last answer of the current attempt's head pod to /status.json."""

    attempt: int
    received: datetime
    """Time of arrival by the operator's clock."""
    status: Status
    """Status that the trainer wrote during this attempt; empty before the first."""
    exit_code: int | None = None
    """Exit code of the trainer's process, once it has ended."""
    complete: bool = False
    """Whether the trainer's process has ended."""


RefusalReason = Literal["CreateRefused", "NameConflict"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why an object of the job could not be made."""

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
    """Pods of the current attempt that something was done to and that are gone, as they were seen last."""
    readers: tuple[ObservedPod, ...] = ()
    """Pods that read the shapes of models; they are none of `pods`."""
    inputs: Mapping[str, ObservedInput] = field(default_factory=dict)
    """Existing jobs by name: those in a job:// of the spec, and the inputs of those."""
    claims: Mapping[str, ObservedClaim] = field(default_factory=dict)
    """Existing claims by name: those in the spec or in an input's output, and the job's own."""
    quota: ObservedQuota | None = None
    heartbeat: Heartbeat | None = None
    measured: tuple[Attempt, ...] = ()
    """Newest measured attempt of each other job of the namespace; read with `fresh` only."""
    nodes: tuple[ObservedNode, ...] | None = None
    """None where the operator may not list nodes: then spec.resources is believed."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Priority of pods by PriorityClass; the key "" stands for pods without one."""
    taken: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Amounts that others hold on each node: requests of pods, and room that other jobs have reserved."""
    held_by_jobs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The part of `taken` that RLHFJobs hold, and so will give back."""
    line: tuple[ObservedJob, ...] = ()
    """Other jobs of all namespaces that wait for room, or may once they have been looked at."""
    capabilities: frozenset[Capability] = frozenset({"kuberay"})
    """Capabilities of the cluster that the operator may use."""
    refused: Refusal | None = None
    """Refusal in the last pass; None if no object was refused."""
    complaint: str = ""
    """The newest warning about an object of the job that should have pods and has none; read with `fresh` only."""
    watching_since: datetime
    """Absence and silence before this time prove nothing: the operator was not there."""
    fresh: bool = False
    """Whether job and RayJobs were read from the server in this pass, and not from the cache."""
    alone: bool = False
    """Whether no other job reserves room in the meantime."""

    def in_queue(self, job: ObservedJob) -> bool:
        """Whether Kueue says when a job may begin; where it is not installed, the label of its queues says nothing."""
        return names.QUEUE in job.labels and "kueue" in self.capabilities

    @property
    def in_line(self) -> bool:
        """Whether the operator itself says when the job may begin."""
        return self.nodes is not None and not self.in_queue(self.job)

    def taken_by_foreign_pods(self) -> dict[str, Counter[str]]:
        """Amounts that stay taken on each node when all other jobs have ended."""
        return {node: Counter(taken) - Counter(self.held_by_jobs.get(node, {})) for node, taken in self.taken.items()}

    def without(self, nodes: Collection[str]) -> Snapshot:
        """Return the snapshot without these nodes."""
        left = None if self.nodes is None else tuple(each for each in self.nodes if each.name not in nodes)
        return replace(self, nodes=left)

    def current_rayjob(self) -> ObservedRayJob | None:
        """The RayJob of the attempt that the status names, if it is this job's."""
        number = self.job.status.attempt
        return next((each for each in self.rayjobs if each.owned and each.attempt == number), None)

    def current_heartbeat(self) -> Heartbeat | None:
        """The trainer's latest heartbeat, if it is about the current attempt."""
        beat = self.heartbeat
        return beat if beat is not None and beat.attempt == self.job.status.attempt else None


def amounts(quantities: Mapping[str, Any]) -> Counter[str]:
    """Thousandths of CPUs, bytes of memory and storage, numbers of devices; rounded up, without what is no quantity."""
    found = Counter[str]()
    for name, quantity in quantities.items():
        with suppress(ValueError):  # those of a template may be numbers
            found[name] = math.ceil(amount(str(quantity)) * (1000 if name == "cpu" else 1))
    return found


def requests_of(pod: Document) -> Counter[str]:
    """Requests of a pod: the sum over its containers, or of one init container if that is larger.

    As in Kubernetes, a container with a limit and no request requests its limit.
    """

    def requested(container: Document) -> Counter[str]:
        resources = container.get("resources", {})
        return amounts({**resources.get("limits", {}), **resources.get("requests", {})})

    before = pod.get("initContainers", ())
    together = Counter[str]()
    for each in (*pod["containers"], *(each for each in before if each.get("restartPolicy") == "Always")):
        together.update(requested(each))
    for each in before:
        together |= requested(each)
    together.update(amounts(pod.get("overhead", {})))
    return together


def inputs_of(spec: Document) -> set[str]:
    """Names of the jobs that a spec's models and data come from (job://), whether or not the spec is right."""
    read = [spec.get(part) for part in ("models", "data", "evaluation")]
    return {uri.removeprefix("job://") for uri in _uris(read, "job://")}


def claims_named(spec: Document) -> set[str]:
    """Names of the claims that a spec names (pvc://claim/...); none of them is made by the operator."""
    parts = [part for field, part in spec.items() if field != "runtime"]
    return {uri.removeprefix("pvc://").split("/")[0] for uri in _uris(parts, "pvc://")}


def _uris(value: object, scheme: str) -> Iterator[str]:
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str) and found.startswith(scheme):
            yield found
        elif isinstance(found, Mapping):
            waiting += [part for name, part in found.items() if name != "arguments"]  # those of a function are its own
        elif isinstance(found, list | tuple):
            waiting += found
