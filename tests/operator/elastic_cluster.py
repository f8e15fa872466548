"""A simulated cluster with jobs whose rollout pool is elastic: KubeRay, kubelets and trainers are played."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from rlhf_api.status import MappedPool, Metric, Progress, Status
from rlhf_operator import names
from rlhf_operator.actions import Event, Plan, Resize
from rlhf_operator.cluster.cache import Key
from rlhf_operator.snapshot import Heartbeat
from rlhf_operator.times import timestamp
from tests.operator.shared_cluster import Document, SharedCluster
from tests.operator.test_small_jobs_begin_before_their_turn import job, nodes_of

POOL = "writers"
READY = [{"type": "Ready", "status": "True"}]


def elastic(fewest: int = 1, most: int = 3, **fields: Any) -> Document:
    """GRPO with one pod that trains, and an elastic pool; 24 responses a step allow 1, 2, 3 and 4 nodes."""
    made = job(1)
    pools = [
        {"name": "train", "models": ["actor"], "slotsPerNode": 1},
        {"name": POOL, "models": ["rollout"], "nodes": fewest, "maxNodes": most, "slotsPerNode": 1},
    ]
    return {
        **made,
        "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.0}},
        "models": {**made["models"], "reward": {"entrypoint": "rlhf_examples.helpful.rule:score"}},
        "data": {**made["data"], "maxPromptTokens": 64, "maxResponseTokens": 64},
        "training": {"totalSteps": 10_000, "promptBatchSize": 6},
        "rollout": {"samplesPerPrompt": 4},
        "resources": {"device": "CPU"},
        "placement": {"mode": "Manual", "pools": pools},
        **fields,
    }


class ElasticCluster(SharedCluster):
    """Pods run as soon as they have a node; a trainer uses the pods that run when a step begins."""

    def __init__(self, workers: int, *more: Any, settings: Any = None) -> None:
        self.steps: dict[str, int] = {}
        self.metrics: dict[str, dict[str, float]] = {}
        self.sizes: dict[str, Resize] = {}
        self.told: list[Resize] = []
        self.events: list[Event] = []
        self.exit_code: int | None = None
        self.is_kuberay_away = self.do_pods_linger = self.keep_pending = False
        super().__init__(nodes_of(workers), 0, *more, settings=settings)

    # What is heard

    def heartbeats(self) -> Any:
        return self

    def last(self, uid: str, attempt: int | None) -> Heartbeat | None:
        """Last heartbeat of the trainer, once it has made a step."""
        found = [name for name in self.homes if self.cache.jobs.get(self.home(name)) and self.job(name).uid == uid]
        if not found or not attempt or not self.steps.get(f"{found[0]}-a{attempt}"):
            return None
        rayjob = f"{found[0]}-a{attempt}"
        now, step = timestamp(self.now), self.steps[rayjob]
        metrics = tuple(Metric(name=name, value=f"{value:g}") for name, value in self.metrics[rayjob].items())
        progress = Progress(step=step, total_steps=10_000, stage="GRPO", step_seconds=5.0, last_step_time=now)
        status = Status(phase="Running", progress=progress, metrics=metrics)
        code = self.exit_code
        return Heartbeat(attempt=attempt, received=self.now, status=status, exit_code=code, complete=code is not None)

    def step(
        self, name: str, count: int = 1, *, trainer: float = 0.0, pool: float = 0.0, used: int | None = None
    ) -> None:
        """Make steps in which trainer and pool wait for these shares of the time."""
        for _ in range(count):
            rayjob = f"{name}-a{self.status(name).attempt}"
            self.steps[rayjob] = self.steps.get(rayjob, 0) + 1
            found = max(size for size in range(5) if size <= max(len(self.running(name)), 0))
            shares = {"trainer_idle": trainer, "rollout_idle": pool, "rollout_nodes": found if used is None else used}
            self.metrics[rayjob] = shares
            self.wait(5)
            self.queue.add(self.home(name))
            self.settle()

    # What is seen

    def pool(self, name: str) -> MappedPool:
        mapping = self.status(name).mapping
        assert mapping
        assert mapping.elastic_pool
        return mapping.elastic_pool

    def running(self, name: str) -> list[Document]:
        """The pods of the pool that run."""
        return [pod for pod in self.writers(name) if pod["status"]["phase"] == "Running" and not _ends(pod)]

    def writers(self, name: str) -> list[Document]:
        """The pods of the pool."""
        pods = self.pods_of(f"{name}-a{self.status(name).attempt}")
        return [pod for pod in pods if pod["metadata"]["labels"].get(names.POOL) == POOL]

    # KubeRay and kubelets

    def operate(self, key: Key) -> Plan | None:
        plan = super().operate(key)
        self.events += plan.events if plan else ()
        return plan

    def resize(self, action: Resize) -> None:
        self.told.append(action)
        self.sizes[action.cluster] = action

    def make_pods(self) -> bool:
        if self.is_kuberay_away:
            return False
        if super().make_pods():
            for key, rayjob in list(self.objects["rayjobs"].items()):
                if not rayjob.get("status"):
                    self.put("rayjobs", {**rayjob, "status": {"rayClusterName": key[1]}})
            return True
        return any(self._follow(rayjob) for rayjob in list(self.objects["rayjobs"].values()))

    def _follow(self, rayjob: Document) -> bool:
        """Whether pods of a group have been made or ended, so that as many are there as are wanted."""
        name, job = rayjob["metadata"]["name"], rayjob["metadata"]["name"].rpartition("-a")[0]
        groups = rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        group = next((each for each in groups if each["groupName"] == POOL), None)
        if group is None or not self.pods_of(name):
            return False
        wanted = self.sizes[name].nodes if name in self.sizes else group["replicas"]
        leaving = self.sizes[name].leaving if name in self.sizes else ()
        there = [pod for pod in self.writers(job) if pod["metadata"]["name"] not in leaving and not _ends(pod)]
        gone = [pod for pod in self.writers(job) if pod["metadata"]["name"] in leaving and not _ends(pod)]
        for pod in [*gone, *there[wanted:]]:
            self.end_pod(pod)
        for _ in range(wanted - len(there)):
            self.version += 1
            labels, namespace = group["template"]["metadata"]["labels"], rayjob["metadata"]["namespace"]
            self.put("pods", self._pod(f"{name}-w{self.version}", group["template"]["spec"], namespace, **labels))
        return bool(gone) or len(there) != wanted

    def end_pod(self, pod: Document, **status: Any) -> None:
        """A pod is deleted; it lingers, if pods do."""
        if self.do_pods_linger:
            deleted = {**pod["metadata"], "deletionTimestamp": timestamp(self.now + timedelta(seconds=30))}
            self.put("pods", {**pod, "metadata": deleted, "status": {**pod["status"], **status}})
        else:
            self.remove("pods", pod)

    def bury(self) -> None:
        """Pods that end are gone."""
        for pod in list(filter(_ends, self.objects["pods"].values())):
            self.remove("pods", pod)
        self.settle()

    def schedule(self) -> bool:
        if super().schedule():
            return True
        bound = [pod for pod in self.objects["pods"].values() if pod["spec"].get("nodeName") and _is_of_a_job(pod)]
        waiting = [pod for pod in bound if pod["status"]["phase"] == "Pending" and not self.keep_pending]
        for pod in waiting:
            conditions = [*pod["status"].get("conditions", ()), *READY]
            self.put("pods", {**pod, "status": {"phase": "Running", "conditions": conditions}})
        return bool(waiting)


def _ends(pod: Document) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _is_of_a_job(pod: Document) -> bool:
    return names.ROLE in pod["metadata"].get("labels", {})


def resizes(events: Iterable[Event]) -> list[str]:
    """Messages of the events about elastic pools."""
    return [each.message for each in events if each.reason == "RolloutPoolResized"]
