"""Many jobs on one cluster, simulated: cache, observer and `decide` are real; server, KubeRay and scheduler are played.

The operator is told of a job when the cache says that something has changed for it, or when the time has come that its
last plan named: a job that nobody wakes is found by the tests.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from rlhf_api.names import API_VERSION, KIND
from rlhf_api.status import Condition, Status
from rlhf_operator import conditions
from rlhf_operator.actions import Create, Delete, Plan, ReadLive, Resize
from rlhf_operator.cluster import parse
from rlhf_operator.cluster.cache import Cache, Key, KindName
from rlhf_operator.cluster.discovery import Offer
from rlhf_operator.cluster.observe import Observer
from rlhf_operator.reconcile.decide import decide
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Capability, ObservedJob, Snapshot, amounts
from rlhf_operator.times import timestamp
from tests.operator.fake_trainer import START
from tests.operator.simulated import SFT

Document = dict[str, Any]
NAMESPACE = "team"
SMALL = {"cpu": "1", "memory": "1Gi"}
SECOND = timedelta(seconds=1)


class NoHeartbeats:
    """No head pod is ever asked."""

    def last(self, *_: object) -> None:
        """Nothing was heard."""


def spec(workers: int = 1, cpus: int = 1, on: Mapping[str, str] | None = None, **fields: Any) -> Document:
    """SFT on so many worker pods with so many CPUs; a head pod has one, and a node of `node` no memory to spare."""
    resources = {"device": "CPU", "nodes": workers, "slotsPerNode": 1}
    template = {"spec": {"nodeSelector": dict(on or {})}}
    runtime = {"worker": {"cpu": str(cpus), "memory": "1Gi", "template": template}, "controller": SMALL}
    return {**SFT, "resources": resources, "runtime": runtime, **fields}


def node(name: str, cpus: float, has: Mapping[str, str] | None = None, **labels: str) -> Document:
    """A node, and what it has besides; a head pod has a side-car of 50m."""
    metadata = {"name": name, "uid": name, "labels": labels}
    ready = {"type": "Ready", "status": "True"}
    allocatable = {"cpu": str(cpus), "memory": "512Gi", **(has or {})}
    return {"metadata": metadata, "status": {"conditions": [ready], "allocatable": allocatable}}


class SharedCluster:
    """A server that knows jobs, RayJobs, pods, claims and nodes, and the operator beside it."""

    def __init__(
        self, nodes: Sequence[Document], seed: int = 0, *more: Capability, settings: Settings | None = None
    ) -> None:
        self.random = random.Random(seed)
        self.capabilities: frozenset[Capability] = frozenset({"kuberay", "nodes", *more})
        self.now: datetime = START
        self.settings = settings or Settings()
        self.objects: dict[KindName, dict[Key, Document]] = {
            "jobs": {},
            "rayjobs": {},
            "pods": {},
            "claims": {},
            "nodes": {},
            "priorities": {},
        }
        self.version = 0
        self.homes: dict[str, str] = {}
        self.begun: list[str] = []
        self.passes = 0
        self.start_operator()
        for each in nodes:
            self.put("nodes", each)

    # The operator

    def start_operator(self) -> None:
        """One that knows nothing but what the server says."""
        self.cache = Cache()
        nobody: Any = NoHeartbeats()
        self.observer = Observer(nobody, self.cache, self.heartbeats(), self.settings, lambda _: None)
        self.observer.offer = Offer(capabilities=self.capabilities, kinds=())
        self.since = self.now
        self.timers: dict[Key, datetime] = {}
        for kind, table in self.objects.items():
            for each in table.values():
                self.cache.put(kind, each)
        self.queue: set[Key] = set(self.objects["jobs"])

    def heartbeats(self) -> Any:
        """Heartbeats of the trainers."""
        return NoHeartbeats()

    def operate(self, key: Key) -> Plan | None:
        """One pass over a job."""
        self.passes += 1
        self.queue.discard(key)
        self.timers.pop(key, None)
        seen = self.observe(key)
        if seen is None:
            return None
        plan = decide(seen, self.now, self.settings)
        while any(isinstance(each, ReadLive) for each in plan.actions):
            seen = replace(seen, fresh=True, alone=seen.fresh)
            plan = decide(seen, self.now, self.settings)
        self.write(key, plan.status)
        for action in plan.actions:
            match action:
                case Create(manifest=manifest):
                    self._create(manifest)
                case Delete(kind="RayJob", name=name):
                    self.delete_rayjob(*self.home(name))
                case Resize():
                    self.resize(action)
        if plan.requeue_after is not None:
            self.timers[key] = self.now + timedelta(seconds=plan.requeue_after)
        return plan

    def observe(self, key: Key) -> Snapshot | None:
        """As the cache shows it."""
        return _result(self.observer.observe(key, fresh=False, since=self.since))

    def write(self, key: Key, status: Status) -> None:
        """The status of a job, if it is another one."""
        before = self.objects["jobs"][key]
        if self.job(key[1]).status != status:
            self.put("jobs", {**before, "status": status.document()})

    def resize(self, action: Resize) -> None:
        """Set the size of an elastic pool in KubeRay."""
        raise AssertionError(f"nobody plays KubeRay's part: {action}")

    def _create(self, manifest: Mapping[str, Any]) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind == "RayJob":
            assert self.home(name) not in self.objects["rayjobs"]
            self.begun.append(name)
            self._make("rayjobs", manifest)
        elif kind == "PersistentVolumeClaim":
            self._make("claims", manifest)

    def _make(self, kind: KindName, manifest: Mapping[str, Any]) -> None:
        key = (manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        if key not in self.objects[kind]:
            self.put(kind, {**manifest, "metadata": self.metadata(manifest["metadata"])})

    def delete_rayjob(self, namespace: str, name: str) -> None:
        """A RayJob is deleted, and its pods with it."""
        if rayjob := self.objects["rayjobs"].get((namespace, name)):
            self.remove("rayjobs", rayjob)
            for pod in self.pods_of(name):
                self.remove("pods", pod)

    # The server

    def put(self, kind: KindName, document: Mapping[str, Any]) -> None:
        """An object is made or changed."""
        self.queue |= self.cache.put(kind, self.store(kind, document))

    def store(self, kind: KindName, document: Mapping[str, Any]) -> Document:
        """The server keeps an object in a new version; nobody has heard of it."""
        self.version += 1
        metadata = {**document["metadata"], "resourceVersion": str(self.version)}
        made = {**document, "metadata": metadata}
        self.objects[kind][metadata.get("namespace", ""), metadata["name"]] = made
        return made

    def remove(self, kind: KindName, document: Document) -> None:
        """An object is gone."""
        del self.objects[kind][document["metadata"].get("namespace", ""), document["metadata"]["name"]]
        self.queue |= self.cache.remove(kind, document)

    def submit(self, name: str, of: Mapping[str, Any], namespace: str = NAMESPACE, **labels: str) -> None:
        """A user makes a job; no other has its name, in whatever namespace."""
        self.homes[name] = namespace
        metadata = self.metadata({"name": name, "namespace": namespace, "labels": labels, "generation": 1})
        self.put("jobs", {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": dict(of)})

    def metadata(self, of: Mapping[str, Any]) -> Document:
        """Metadata of a new object."""
        return {**of, "uid": f"uid-{self.version + 1}", "creationTimestamp": timestamp(self.now)}

    def occupy(self, name: str, on: str, cpus: float) -> None:
        """A pod of a stranger is on a node."""
        self.put(
            "pods", self._pod(name, {"containers": [{"resources": {"requests": {"cpu": str(cpus)}}}], "nodeName": on})
        )

    def _pod(self, name: str, of: Mapping[str, Any], namespace: str = NAMESPACE, **labels: str) -> Document:
        metadata = self.metadata({"name": name, "namespace": namespace, "labels": labels})
        containers = {part: [*map(_defaulted, of.get(part, ()))] for part in ("containers", "initContainers")}
        return {"metadata": metadata, "spec": {**of, **containers}, "status": {"phase": "Pending"}}

    # What is seen of it

    def home(self, name: str) -> Key:
        """The key of a job, or of the RayJob of an attempt."""
        job = name if name in self.homes else name.rpartition("-a")[0]
        return self.homes.get(job, NAMESPACE), name

    def job(self, name: str) -> ObservedJob:
        entry = self.cache.jobs.get(self.home(name))
        assert entry
        return entry.value

    def status(self, name: str) -> Status:
        return self.job(name).status

    def condition(self, name: str, kind: Any) -> Condition:
        found = conditions.found(self.status(name).conditions, kind)
        assert found
        return found

    def pods_of(self, rayjob: str) -> list[Document]:
        return [each for each in self.objects["pods"].values() if each["metadata"]["name"].startswith(f"{rayjob}-")]

    def free(self, node: str) -> Counter[str]:
        """What no pod holds there."""
        left = amounts(self.objects["nodes"]["", node]["status"]["allocatable"])
        for pod in self.objects["pods"].values():
            if pod["spec"].get("nodeName") == node:
                left.subtract(parse.pod(pod).requests)
        return left

    # KubeRay, the scheduler, trainers

    def make_pods(self) -> bool:
        """KubeRay makes the pods of a RayJob that has none."""
        for key in self._shuffled("rayjobs"):
            if not self.pods_of(key[1]):
                self._make_pods(self.objects["rayjobs"][key])
                return True
        return False

    def _make_pods(self, rayjob: Document) -> None:
        cluster, name = rayjob["spec"]["rayClusterSpec"], rayjob["metadata"]["name"]
        templates = [cluster["headGroupSpec"]["template"]]
        for group in cluster["workerGroupSpecs"]:
            templates += [group["template"]] * group["numOfHosts"] * group["replicas"]
        for number, each in enumerate(templates):
            labels, namespace = each["metadata"]["labels"], rayjob["metadata"]["namespace"]
            self.put("pods", self._pod(f"{name}-{number}", each["spec"], namespace, **labels))

    def schedule(self) -> bool:
        """The scheduler takes a pod without a node, and finds one or says that there is none."""
        for key in self._shuffled("pods"):
            pod = self.objects["pods"][key]
            if not pod["spec"].get("nodeName") and self._bind(pod):
                return True
        return False

    def _bind(self, pod: Document) -> bool:
        """Whether something has changed."""
        asked, labels = parse.pod(pod).requests, pod["spec"].get("nodeSelector", {})
        fitting = [
            name
            for _, name in self._shuffled("nodes")
            if labels.items() <= self.objects["nodes"]["", name]["metadata"]["labels"].items()
            if all(self.free(name)[what] >= number for what, number in asked.items())
        ]
        was_told = bool(pod["status"].get("conditions"))
        scheduled = {
            "type": "PodScheduled",
            "status": "True" if fitting else "False",
            "lastTransitionTime": timestamp(self.now),
        }
        if not fitting and was_told:
            return False
        told = {**scheduled, "message": "" if fitting else "0 nodes are available: Insufficient cpu"}
        spec = {**pod["spec"], "nodeName": fitting[0]} if fitting else pod["spec"]
        self.put("pods", {**pod, "spec": spec, "status": {"phase": "Pending", "conditions": [told]}})
        return True

    def end_one(self) -> bool:
        """A trainer whose pods all have nodes comes to its end."""
        for key in self._shuffled("rayjobs"):
            rayjob, pods = self.objects["rayjobs"][key], self.pods_of(key[1])
            if pods and all(pod["spec"].get("nodeName") for pod in pods) and not rayjob.get("status"):
                self.end(key[1])
                return True
        return False

    def end(self, rayjob: str, word: str = "SUCCEEDED") -> None:
        """Ray says that an attempt is over."""
        document = self.objects["rayjobs"][self.home(rayjob)]
        status = {"jobStatus": word, "jobDeploymentStatus": "Complete" if word == "SUCCEEDED" else "Failed"}
        self.put("rayjobs", {**document, "status": status})

    def _shuffled(self, kind: KindName) -> list[Key]:
        keys = sorted(self.objects[kind])
        self.random.shuffle(keys)
        return keys

    # Time

    def pass_over_all(self) -> None:
        """The operator does what there is to do now."""
        for _ in range(10_000):
            self.queue |= set() if self.queue else set(self.observer.next_in_line())
            if not self.queue:
                return
            self.operate(self.random.choice(sorted(self.queue)))
        raise AssertionError("the operator never comes to rest")

    def settle(self) -> None:
        """Operator, KubeRay and scheduler do what there is to do now; no trainer ends."""
        self.pass_over_all()
        while self.make_pods() or self.schedule():
            self.pass_over_all()

    def wait(self, seconds: float) -> None:
        """Time passes, and all settles at each moment that a plan has named."""
        end = self.now + timedelta(seconds=seconds)
        while (due := min(self.timers.values(), default=end)) < end:
            self.now = max(due, self.now)
            self._ring()
            self.settle()
        self.now = end
        self._ring()
        self.settle()

    def _ring(self) -> None:
        for key in [key for key, due in self.timers.items() if due <= self.now]:
            del self.timers[key]
            self.queue.add(key)


def _defaulted(container: Document) -> Document:
    """As the API server keeps it: requests as texts, and of what is limited only as much."""
    resources = container.get("resources", {})
    asked = {**resources.get("limits", {}), **resources.get("requests", {})}
    return {**container, "resources": {"requests": {name: str(quantity) for name, quantity in asked.items()}}}


def _result(coroutine: Coroutine[Any, Any, Snapshot | None]) -> Snapshot | None:
    """Of one that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        found: Snapshot | None = done.value
        return found
    raise AssertionError("it waits for something")
