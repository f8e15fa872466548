"""A cluster that is simulated: one RLHFJob, and KubeRay, kubelets, the trainer, users and faults played by hand.

Nothing here is real but `decide`. The world carries out plans as the operator's engine does: the status first and on
condition of its resource version, then the actions; it can die in between, and it can see an old state of things.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from rlhf_api.status import Attempt, Pace, Status
from rlhf_operator import names
from rlhf_operator.actions import Create, Delete, Event, Plan, ReadLive, SetOwner
from rlhf_operator.reconcile.decide import decide
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import (
    Capability,
    Heartbeat,
    ObservedClaim,
    ObservedContainer,
    ObservedJob,
    ObservedNode,
    ObservedPod,
    ObservedQuota,
    ObservedRayJob,
    Refusal,
    Snapshot,
)
from tests.operator.fake_trainer import START, TOTAL_STEPS, Trainer, containers, words
from tests.operator.invariants import InvariantError, check, check_step

FORCE_SECONDS = 300.0
UID = "11111111-2222-3333-4444-555555555555"
SFT: Mapping[str, Any] = {
    "algorithm": {"name": "SFT"},
    "models": {"actor": {"uri": "package://rlhf_examples/helpful/model"}},
    "data": {"train": {"uri": "package://rlhf_examples/helpful/train.jsonl"}},
    "training": {"totalSteps": TOTAL_STEPS, "batchSize": 4},
    "resources": {"device": "CPU", "nodes": 2, "slotsPerNode": 1},
}


@dataclass
class World:
    """The simulated cluster. `now` moves by hand."""

    spec: Mapping[str, Any] = field(default_factory=lambda: dict(SFT))
    labels: dict[str, str] = field(default_factory=dict)
    now: datetime = START
    settings: Settings = field(default_factory=Settings)
    status: Status = field(default_factory=Status)
    generation: int = 1
    lost_fields: tuple[str, ...] = ()
    version: int = 1
    is_deleted: bool = False
    rayjobs: dict[str, ObservedRayJob] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)
    pods: dict[str, ObservedPod] = field(default_factory=dict)
    readers: dict[str, ObservedPod] = field(default_factory=dict)
    sandboxes: dict[str, ObservedPod] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)
    nodes: tuple[ObservedNode, ...] | None = None
    inputs: dict[str, ObservedJob] = field(default_factory=dict)
    claims: dict[str, ObservedClaim] = field(default_factory=dict)
    quota: ObservedQuota | None = None
    seen_quota: ObservedQuota | None = None
    is_quota_lagging: bool = False
    has_kueue: bool = True
    capabilities: frozenset[Capability] = frozenset({"kuberay"})
    trainer: Trainer | None = None
    pace: Pace | None = None
    others: tuple[Attempt, ...] = ()
    complaint: str = ""
    refused: Refusal | None = None
    saved_step: int = 0
    saved_at: datetime = START
    beat: Heartbeat | None = None
    watching_since: datetime = START
    events: list[Event] = field(default_factory=list)
    writes: int = 0
    made: list[str] = field(default_factory=list)
    is_reachable: bool = True
    cached: Snapshot | None = None
    is_lagging: bool = False
    counter: int = 0

    @property
    def phase(self) -> str:
        """As the status has it."""
        return self.status.phase

    # The operator

    def observe(self, *, fresh: bool) -> Snapshot:
        """What a pass sees; a lagging cache shows an old job, RayJobs and pods. Kueue's Workload is never read live."""
        self._listen()
        if not self.is_quota_lagging:
            self.seen_quota = self.quota
        job = ObservedJob(
            namespace="team",
            name="job",
            uid=UID,
            generation=self.generation,
            resource_version=str(self.version),
            created=START,
            deleting=False,
            labels=dict(self.labels),
            spec=self.spec,
            status=self.status,
            lost_fields=self.lost_fields,
        )
        seen = Snapshot(
            job=job,
            rayjobs=tuple(self.rayjobs.values()),
            pods=tuple(self.pods.values()),
            readers=tuple(self.readers.values()),
            sandboxes=tuple(self.sandboxes.values()),
            inputs=dict(self.inputs),
            claims=dict(self.claims),
            quota=self.seen_quota,
            heartbeat=self.beat,
            measured=self.others if fresh else (),
            complaint=self.complaint if fresh else "",
            refused=self.refused,
            nodes=self.nodes,
            capabilities=self.capabilities | ({"kueue"} if self.has_kueue else set()),
            watching_since=self.watching_since,
            fresh=fresh,
            alone=fresh,
        )
        if fresh:
            return seen
        if self.cached is None or not self.is_lagging:
            self.cached = seen
        since = self.watching_since
        return replace(self.cached, heartbeat=self.beat, watching_since=since, nodes=self.nodes, quota=self.seen_quota)

    def operate(self, *, dies_after: int | None = None) -> Plan | None:
        """One pass; it dies after so many actions, or before the status is written (-1)."""
        if self.is_deleted:
            return None
        seen = self.observe(fresh=False)
        plan = decide(seen, self.now, self.settings)
        if any(isinstance(each, ReadLive) for each in plan.actions):
            check(len(plan.actions) == 1 and plan.status == seen.job.status, "ReadLive stands alone")
            seen = self.observe(fresh=True)
            plan = decide(seen, self.now, self.settings)
        check(not any(isinstance(each, ReadLive) for each in plan.actions), "a fresh pass is enough")
        if dies_after == -1:
            return plan
        if plan.status != seen.job.status:
            if seen.job.resource_version != str(self.version):
                return plan  # 409
            self._write(plan.status)
        self.events.extend(plan.events)
        for action in plan.actions[:dies_after]:
            self._act(action, fresh=seen.fresh)
        return plan

    def settle(self, passes: int = 20) -> None:
        """Passes until nothing changes any more."""
        for _ in range(passes):
            before = (self.version, dict(self.rayjobs), dict(self.pods), dict(self.readers), self.is_deleted)
            self.operate()
            self.is_lagging = False
            if before == (self.version, self.rayjobs, self.pods, self.readers, self.is_deleted):
                return
        raise InvariantError("the operator never comes to rest")

    def restart_operator(self) -> None:
        """A new operator knows only what the cluster says."""
        self.watching_since, self.beat, self.cached = self.now, None, None
        self.is_lagging = self.is_quota_lagging = False

    def _write(self, status: Status) -> None:
        read_back = Status.model_validate(status.document(), by_alias=True, by_name=False)
        check(read_back == status, "the API server keeps what is written")
        check_step(self.status, status, self.generation)
        self.status, self.version, self.writes = status, self.version + 1, self.writes + 1

    def _act(self, action: object, *, fresh: bool) -> None:
        check(fresh, f"{type(action).__name__} is decided on live reads")
        match action:
            case Create(manifest=manifest):
                self._create(manifest)
            case Delete(kind="RayJob", name=name, uid=uid):
                if name in self.rayjobs and self.rayjobs[name].uid == uid:
                    self.rayjobs[name] = replace(self.rayjobs[name], deleting=True)
            case Delete(kind="Pod", name=name, uid=uid):
                for pods in (self.pods, self.readers, self.sandboxes):
                    if name in pods and pods[name].uid == uid:
                        check(pods is self.sandboxes or self._is_dead(pods[name]), "only dead pods are forced")
                        del pods[name]
            case SetOwner(claim=name, owned=owned):
                self._own(name, owned=owned)
            case Delete(kind="RLHFJob", uid=uid):
                check(uid == UID and self.status.phase in ("Succeeded", "Failed"), "only a finished job is deleted")
                self.is_deleted = True

    def _own(self, claim: str, *, owned: bool, only_if_new: bool = False) -> None:
        """A claim of the job is deleted with it or not."""
        if not only_if_new or claim not in self.claims:
            seen = self.claims.get(claim, ObservedClaim(name=claim, maker=UID))
            self.claims[claim] = replace(seen, owned=owned, kept_for="" if owned else "job")

    def _create(self, manifest: Mapping[str, Any]) -> None:
        name, kind = manifest["metadata"]["name"], manifest["kind"]
        attempt = self.status.attempt or 0
        if kind == "PersistentVolumeClaim":
            self._own(name, owned=bool(manifest["metadata"]["ownerReferences"]), only_if_new=True)
        if kind == "Pod" and self.refused is None:
            check(name not in self.sandboxes, f"{name} is another pod than those that are there")
            made = ObservedPod(
                name=name, uid=self._uid(), attempt=0, role=names.SANDBOX, created=self.now, node="node-0"
            )
            self.sandboxes[name] = made
        if kind == "Job":
            self._read(name, manifest)
        if kind != "RayJob" or name in self.rayjobs:
            return
        check(not [each for each in self.rayjobs.values() if each.owned], f"{name} is the only RayJob of the job")
        check(not self.pods, f"{name} is made when no pod is left")
        check(attempt == int(name.rpartition("-a")[2]), "the status names an attempt before it is made")
        self.made.append(name)
        workers = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        self.workers[name] = sum(each["replicas"] * each.get("numOfHosts", 1) for each in workers)
        is_queued = self.has_kueue and names.QUEUE in manifest["metadata"].get("labels", {})
        self.rayjobs[name] = ObservedRayJob(
            name=name,
            uid=self._uid(),
            attempt=attempt,
            owned=True,
            created=self.now.replace(microsecond=0),
            deleting=False,
            suspended=is_queued,
        )
        if is_queued:
            self.quota, self.seen_quota = ObservedQuota(reserved=False), None

    def _read(self, job: str, manifest: Mapping[str, Any]) -> None:
        """Kubernetes makes the pod of a reader; in `asked` is what it is to read."""
        if f"{job}-x" in self.readers:
            return
        check(self.status.mapping is None, "nothing is mapped before the shapes are read")
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        self.asked.append(json.loads(container["command"][3]))
        self.readers[f"{job}-x"] = ObservedPod(
            name=f"{job}-x", uid=self._uid(), attempt=0, role=names.READER, created=self.now, node="node-0"
        )

    def told(self, words: str, **fields: Any) -> None:
        """The pod of the reader ends with these last words; `fields` are others of the pod."""
        (pod,) = self.readers.values()
        ended = {"phase": "Succeeded", **fields}
        code = 0 if ended["phase"] == "Succeeded" else 1
        said = ObservedContainer(name=names.READER, exit_code=code, last_words=words)
        self.readers[pod.name] = replace(pod, **{"containers": (said,), **ended})

    # Time and users

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += timedelta(seconds=seconds)

    def edit(self, **fields: Any) -> None:
        """A user changes the spec."""
        self.spec = {**self.spec, **fields}
        self.generation, self.version = self.generation + 1, self.version + 1

    # KubeRay, Kueue, kubelets

    @property
    def live(self) -> ObservedRayJob | None:
        """The RayJob of the job that is not being deleted."""
        return next((each for each in self.rayjobs.values() if each.owned and not each.deleting), None)

    def admit(self) -> None:
        """Kueue reserves the quota; after an eviction only when the last one is free."""
        if self.live and self.live.suspended and not (self.quota and self.quota.reserved):
            self.quota = ObservedQuota(reserved=True)
            self.rayjobs[self.live.name] = replace(self.live, suspended=False)

    def take_quota(self) -> None:
        """Kueue evicts the workload; the quota stays reserved until the cluster is taken down."""
        if self.live and self.quota and self.quota.reserved and not self.live.suspended:
            self.quota = ObservedQuota(reserved=True, evicted="Preempted", message="a job of higher priority came")
            self.rayjobs[self.live.name] = replace(self.live, suspended=True, deployment_status="Suspending")

    def take_down(self) -> None:
        """KubeRay ends the cluster of a suspended RayJob; Kueue frees its quota while the pods are still ending."""
        if self.live and self.live.suspended:
            self._end_pods(self.live)
            self.rayjobs[self.live.name] = replace(self.live, deployment_status="Suspended")
            self.quota = replace(self.quota, reserved=False) if self.quota else None

    def make_pods(self) -> None:
        """KubeRay makes the pods of a RayJob that has none."""
        rayjob = self.live
        if rayjob is None or rayjob.suspended or rayjob.job_status:
            return
        has_pods = any(pod.attempt == rayjob.attempt for pod in self.pods.values())
        if has_pods and rayjob.deployment_status != "Suspended":
            return
        for role in (names.CONTROLLER, *[names.WORKER] * self.workers[rayjob.name]):
            self._pod(rayjob, role)
        self.rayjobs[rayjob.name] = replace(rayjob, deployment_status="Initializing")

    def start_pods(self) -> None:
        """Kubelets run what they can."""
        for pod in list(self.pods.values()):
            if pod.phase == "Pending" and pod.deleting_since is None and not pod.unschedulable:
                self.change(pod.name, phase="Running", ready=True, not_ready_since=None, containers=containers(pod))

    def collect(self) -> None:
        """Deleted and suspended RayJobs lose their pods; kubelets that are there end deleted pods."""
        self.take_down()
        for rayjob in [each for each in self.rayjobs.values() if each.deleting]:
            self._end_pods(rayjob)
            del self.rayjobs[rayjob.name]
            self.sandboxes.clear()  # the garbage collector deletes what it owns
        for pod in list(self.pods.values()):
            if pod.deleting_since and (self._runs_on_a_live_node(pod) or not pod.node):
                del self.pods[pod.name]

    def _end_pods(self, rayjob: ObservedRayJob) -> None:
        for pod in list(self.pods.values()):
            if pod.attempt == rayjob.attempt and pod.deleting_since is None:
                self.change(pod.name, deleting_since=self.now, ready=False)

    def _is_dead(self, pod: ObservedPod) -> bool:
        """Whether no kubelet will end a pod; where nodes are not known, one would have done so long ago."""
        if pod.silent_since is not None:
            return True
        if self.nodes is not None or pod.deleting_since is None:
            return not self._runs_on_a_live_node(pod)
        return (self.now - pod.deleting_since).total_seconds() >= pod.grace_seconds + 300

    def _runs_on_a_live_node(self, pod: ObservedPod) -> bool:
        if self.nodes is None or pod.silent_since is not None:
            return pod.silent_since is None
        return any(node.name == pod.node and node.ready for node in self.nodes)

    def _pod(self, rayjob: ObservedRayJob, role: str) -> None:
        uid = self._uid()
        name = f"{rayjob.name}-{'head' if role == names.CONTROLLER else 'worker'}-{uid}"
        nodes = [node.name for node in self.nodes or () if node.ready] or ["node-0"]
        self.pods[name] = ObservedPod(
            name=name,
            uid=uid,
            attempt=rayjob.attempt,
            role=role,
            created=self.now.replace(microsecond=0),
            not_ready_since=self.now,
            node=nodes[len(self.pods) % len(nodes)],
            ip="10.0.0.1",
        )

    def change(self, pod: str, **fields: Any) -> None:
        """Something happens to a pod."""
        self.pods[pod] = replace(self.pods[pod], **fields)

    def head(self) -> ObservedPod:
        """The head pod."""
        return next(pod for pod in self.pods.values() if pod.role == names.CONTROLLER)

    def worker(self) -> ObservedPod:
        """A worker pod."""
        return next(pod for pod in self.pods.values() if pod.role == names.WORKER)

    # The trainer

    def train(self, steps: int = 1) -> None:
        """The trainer starts where the last checkpoint is, and makes steps."""
        rayjob = self.live
        if rayjob is None or rayjob.job_status or not self._all_run(rayjob):
            return
        if self.trainer is None or self.trainer.attempt != rayjob.attempt:
            first = self.saved_step
            self.trainer = Trainer(rayjob.attempt, first=first, step=first, phase="Running", stepped=self.now)
            self.rayjobs[rayjob.name] = replace(rayjob, deployment_status="Running")
        trainer = self.trainer
        if trainer.exit_code is not None:
            return
        for _ in range(min(steps, TOTAL_STEPS - trainer.step)):
            trainer.step, trainer.stepped = trainer.step + 1, self.now
            if trainer.step % 10 == 0:
                self.saved_step, self.saved_at = trainer.step, self.now
        if trainer.step == TOTAL_STEPS:
            trainer.phase = "Succeeded"

    def end(self, exit_code: int, message: str = "") -> None:
        """The trainer's process ends; an orderly end is in its status too."""
        if self.trainer is None or self.trainer.exit_code is not None:
            return
        self.trainer.exit_code, self.trainer.message = exit_code, message
        if 0 < exit_code <= 8:
            self.trainer.phase = "Failed"

    def save_and_end(self, step: int) -> None:
        """The trainer ends its step and saves it, as it is told by SIGTERM."""
        assert self.trainer
        self.trainer.step = self.saved_step = step
        self.trainer.stepped = self.saved_at = self.now

    def ray_tells(self) -> None:
        """KubeRay has noticed that the Ray job is over."""
        rayjob, trainer = self.live, self.trainer
        if rayjob is None or trainer is None or trainer.attempt != rayjob.attempt or trainer.exit_code is None:
            return
        is_ok = trainer.exit_code == 0
        message = "" if is_ok else f"Job entrypoint command failed with exit code {trainer.exit_code}"
        self.rayjobs[rayjob.name] = replace(
            rayjob,
            job_status="SUCCEEDED" if is_ok else "FAILED",
            deployment_status="Complete" if is_ok else "Failed",
            message=message,
        )

    def _all_run(self, rayjob: ObservedRayJob) -> bool:
        mine = [pod for pod in self.pods.values() if pod.attempt == rayjob.attempt]
        return bool(mine) and all(pod.phase == "Running" and pod.deleting_since is None for pod in mine)

    def _listen(self) -> None:
        """The operator reads /status.json of the head pod, if there is one that answers."""
        rayjob, trainer = self.rayjobs.get(f"job-a{self.status.attempt}"), self.trainer
        heads = [pod for pod in self.pods.values() if pod.role == names.CONTROLLER and pod.phase == "Running"]
        if rayjob is None or not heads or not self.is_reachable or not self._runs_on_a_live_node(heads[0]):
            return
        if trainer is None or trainer.attempt != rayjob.attempt:
            self.beat = Heartbeat(attempt=rayjob.attempt, received=self.now, status=Status())
            return
        self.beat = Heartbeat(
            attempt=rayjob.attempt,
            received=self.now,
            status=words(trainer, self.saved_step, self.saved_at, self.pace),
            exit_code=trainer.exit_code,
            complete=trainer.exit_code is not None,
        )

    def _uid(self) -> str:
        self.counter += 1
        return f"u{self.counter}"

    # Short cuts

    def run_to(self, step: int) -> None:
        """A job without trouble, up to a step."""
        self.settle()
        self.make_pods()
        self.start_pods()
        self.settle()
        self.train(step - (self.trainer.step if self.trainer and self.trainer.attempt == self.status.attempt else 0))
        self.settle()

    def start_again(self) -> None:
        """The next attempt begins: old pods are gone and the pause is over."""
        self.collect()
        self.settle()
        self.wait(400)
        self.settle()
