"""Clusters of users: tainted GPUs, nodes that an autoscaler adds, jobs that begin early or give nodes to others.

API server, scheduler and KubeRay are real; kubelets, trainers and the autoscaler are played.
`python -m tests.cluster.clusters FILE` starts a cluster for it, and writes as JSON what the jobs went through.
"""

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlhf_operator.cluster.autoscalers import read_live_groups
from rlhf_operator.cluster.client import Client
from rlhf_operator.names import POOL
from rlhf_operator.settings import Settings
from tests.cluster.api_world import write_measured
from tests.cluster.autoscaler import Autoscaler
from tests.cluster.client import Cluster
from tests.cluster.lifecycle import PODS, SECONDS, Document, running_status
from tests.cluster.stage import Lives, small_job, stage

A100 = "NVIDIA-A100-SXM4-80GB"
GROWS = {"name": "a100", "matchLabels": {"pool": "a100"}, "max": 2, "gpu": A100, "gpusPerNode": 8}
TAINT = {"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}
NAMESPACE = "clusters"
UNKNOWN = (None, "ReadingShapes")
"""Reasons of a job of which the operator has not judged yet whether it can be mapped."""
RESIZES = 3
"""Times that the pool of `elastic` changes its size."""


@contextmanager
def nodes(server: Cluster, pool: str, resources: Mapping[str, str], *, count: int = 1) -> Iterator[None]:
    """Made-up nodes with the label `pool` are there meanwhile."""
    names = [f"{pool}-{number}" for number in range(count)]
    for name in names:
        server.add_node(name, resources, {"pool": pool, "nvidia.com/gpu.product": A100})
    try:
        yield
    finally:
        for name in names:
            server.remove_node(name)


def on(pool: str, name: str, lives: Lives, workers: int = 1) -> Document:
    """A job whose workers take a CPU each, on nodes of this pool only; its head pod may be anywhere."""
    job = small_job(name, lives.jobs.namespace)
    job["spec"]["resources"] = {"device": "CPU", "nodes": workers, "slotsPerNode": 1}
    job["spec"]["runtime"] = {"worker": {"cpu": "1", "template": {"spec": {"nodeSelector": {"pool": pool}}}}}
    return job


def tainted(lives: Lives) -> Document:
    """Answer of the operator to a job with `device: Auto` where all GPUs are behind a taint."""
    server, job = lives.jobs.server, on("tainted", "tainted", lives)
    job["spec"]["resources"] = {"slotsPerNode": 1}
    with nodes(server, "tainted", {"nvidia.com/gpu": "8"}):
        server.expect("PATCH", "/api/v1/nodes/tainted-0", {"spec": {"taints": [TAINT]}})
        lives.apply(job)
        lives.jobs.wait_for("tainted", "Mapping")
        told = server.until(
            lambda: found if (found := lives.jobs.condition("tainted", "Mapped")).get("reason") not in UNKNOWN else {},
            SECONDS,
            "the operator says why tainted is not mapped",
        )
        lives.jobs.delete("tainted")
    return {"reason": told["reason"], "told": told["message"]}


def autoscaled(lives: Lives) -> Document:
    """A GPU job that begins on a node which the autoscaler adds for its pods; what an eviction of a pod is answered."""
    job, server, namespace = small_job("grows", lives.jobs.namespace), lives.jobs.server, lives.jobs.namespace
    job["spec"]["resources"] = {"device": "GPU", "nodes": 1, "slotsPerNode": 8}
    lives.apply(job)
    waiting = lives.jobs.wait_for("grows", "WaitingForNodes")
    groups = {"a100": ({"pool": "a100"}, {"nvidia.com/gpu": "8"}, 2)}
    with Autoscaler(server, namespace, groups) as autoscaler:
        pods = lives.jobs.wait_for_pods("grows", 1)
        lives.train("grows")
        name = pods[0]["metadata"]["name"]
        code, _ = server.request("POST", f"{PODS.format(namespace)}/{name}/eviction", evicting(name))
        final = lives.succeed("grows")
    return {
        "reserved": sorted(each["node"] for each in waiting["reserved"]),
        "added": autoscaler.added["a100"],
        "nodes": sorted({pod["spec"]["nodeName"] for pod in pods}),
        "eviction": code,
        "outcomes": [each["outcome"] for each in final["attempts"]],
    }


def backfilled(lives: Lives) -> Document:
    """A short job passes a wide one, and gives its node back as soon as the wide one could begin."""
    server = lives.jobs.server
    long, wide, short = "line-1-long", "line-2-wide", "line-3-short"  # within a second names decide the turn
    with nodes(server, "busy", {"cpu": "1500m"}, count=2):
        lives.apply(on("busy", long, lives))
        lives.jobs.wait_for_pods(long, 1)
        lives.apply(on("busy", wide, lives, workers=2))
        lives.jobs.wait_for(wide, "Queued")
        lives.apply(on("busy", short, lives))
        lives.train(short)
        meanwhile = lives.jobs.phase(wide)
        lives.train(long)
        lives.succeed(long)
        lives.jobs.wait_for_pods(wide, 1, 3)
        server.until(lambda: lives.kubelets.trainer(wide).document, SECONDS, f"{wide} runs")
        finals = {"wide": lives.succeed(wide)}
        lives.train(short, 2)
        finals["short"] = lives.succeed(short, 2)
    outcomes = {name: [each["outcome"] for each in final["attempts"]] for name, final in finals.items()}
    return {"wide_meanwhile": meanwhile, "backfilled": finals["short"]["attempts"][0]["backfilled"], **outcomes}


def shrunk(lives: Lives) -> Document:
    """A job on two nodes gives one to a job of higher priority at a checkpoint, and takes it back later."""
    server, big, urgent = lives.jobs.server, "gives-a-node", "urgent"
    low, high = on("shared", big, lives), on("shared", urgent, lives)
    low["spec"]["resources"]["maxNodes"] = 2
    high["spec"]["runtime"]["worker"]["template"]["spec"]["priorityClassName"] = "system-cluster-critical"
    trainer = lives.kubelets.trainer(big)

    def report(attempt: int, step: int, checkpoint: int) -> None:
        """Steps take so long that none can end within the grace period."""
        server.until(lambda: trainer.document.get("attempt") == attempt, SECONDS, f"attempt {attempt} runs")
        trainer.trains(attempt, step, 100, checkpoint)
        trainer.document["status"]["progress"]["stepSeconds"] = 25.0
        server.until(
            lambda: lives.jobs.status(big).get("progress", {}).get("step") == step, SECONDS, f"step {step} is known"
        )

    with nodes(server, "shared", {"cpu": "1500m"}, count=2):
        lives.apply(low)
        lives.jobs.wait_for_pods(big, 1, 3)
        report(1, 9, 2)
        lives.apply(high)
        lives.jobs.wait_for(urgent, "Queued")
        report(1, 10, 2)
        told = server.until(
            lambda: told if "next checkpoint" in (told := waits_for(lives, urgent)) else "",
            SECONDS,
            f"{urgent} says that it waits for a checkpoint",
        )
        before = lives.jobs.status(big)["attempts"]
        report(1, 11, 11)
        lives.train(urgent)
        report(2, 12, 11)
        phases = {name: lives.jobs.phase(name) for name in (big, urgent)}
        lives.succeed(urgent)
        report(2, 13, 13)
        lives.jobs.wait_for_pods(big, 3, 3)
        report(3, 14, 13)
        attempts = lives.succeed(big, 3)["attempts"]
    return {
        "told": told,
        "before": [each["outcome"] for each in before],
        "meanwhile": phases,
        "attempts": [[each[field] for field in ("outcome", "slots", "firstStep")] for each in attempts],
    }


def elastic(lives: Lives) -> Document:
    """A rollout pool takes idle nodes, gives one to a new job, and survives evictions."""
    server, grows, comes = lives.jobs.server, "line-4-grows", "line-5-comes"
    job = on("elastic", grows, lives)
    pools = [{"name": "train", "models": ["actor"], "slotsPerNode": 1}]
    pools += [{"name": "writers", "models": ["rollout"], "nodes": 1, "maxNodes": 3, "slotsPerNode": 1}]
    job["spec"] |= {
        "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.0}},
        "models": {**job["spec"]["models"], "reward": {"entrypoint": "rlhf_examples.helpful.rule:score"}},
        "training": {"totalSteps": 1000, "promptBatchSize": 6},
        "rollout": {"samplesPerPrompt": 4},
        "resources": {"device": "CPU"},
        "placement": {"mode": "Manual", "pools": pools},
    }
    with nodes(server, "elastic", {"cpu": "1500m"}, count=4):
        lives.apply(job)
        lives.jobs.wait_for_pods(grows, 1, 3)
        steps = Steps(lives, grows)
        steps.make_until(3, idle=0.5)
        full = len(lives.jobs.pods(grows))
        lives.apply(on("elastic", comes, lives))
        steps.make_until(2, idle=0.0)
        lives.train(comes)
        path, evicted = PODS.format(lives.jobs.namespace), [*steps.pods("train"), steps.pods("writers")[0]]
        codes = [server.request("POST", f"{path}/{name}/eviction", evicting(name))[0] for name in evicted]
        steps.make_until(2, idle=0.0)
        sizes = server.until(
            lambda: found if len(found := resizes(lives, grows)) >= RESIZES else [],
            SECONDS,
            f"events of {grows} tell {RESIZES} sizes",
        )
        finals = [lives.succeed(name)["attempts"] for name in (comes, grows)]
    outcomes = [each["outcome"] for attempts in finals for each in attempts]
    return {"pods": full, "told": sorted(sizes), "evictions": codes, "outcomes": outcomes}


class Steps:
    """Steps of the trainer of a job with an elastic pool."""

    def __init__(self, lives: Lives, name: str) -> None:
        self._lives, self._name, self._step = lives, name, 0

    def pods(self, pool: str) -> list[str]:
        """Names of the pods of a pool that run and stay."""
        ready = {"type": "Ready", "status": "True"}
        return [
            pod["metadata"]["name"]
            for pod in self._lives.jobs.pods(self._name)
            if pod["metadata"]["labels"].get(POOL) == pool
            if "deletionTimestamp" not in pod["metadata"]
            if any(ready.items() <= each.items() for each in pod["status"].get("conditions", []))
        ]

    def make_until(self, size: int, *, idle: float) -> None:
        """Make steps in which the trainer waits for the share `idle`, until it uses `size` nodes of its pool."""
        trainer, used = self._lives.kubelets.trainer(self._name), 0
        while used != size:
            self._step, used = self._step + 1, len(self.pods("writers"))
            numbers = {"trainer_idle": idle, "rollout_idle": 0.0, "rollout_nodes": used}
            metrics = [{"name": name, "value": f"{value:g}"} for name, value in numbers.items()]
            status = running_status(self._step, 1000, 0) | {"metrics": metrics}
            trainer.document = {"attempt": 1, "status": status, "complete": False, "exitCode": None}
            self._lives.jobs.server.until(self._is_known, SECONDS, f"step {self._step} is known")

    def _is_known(self) -> bool:
        return bool(self._lives.jobs.status(self._name).get("progress", {}).get("step") == self._step)


def resizes(lives: Lives, name: str) -> list[str]:
    """What events say of the sizes of a pool of a job."""
    return [each["note"] for each in lives.jobs.events(name) if each["reason"] == "RolloutPoolResized"]


def waits_for(lives: Lives, name: str) -> str:
    """What a job in line says it waits for; empty before it says something."""
    return str(lives.jobs.condition(name, "QuotaReserved").get("message", ""))


def evicting(pod: str) -> Document:
    """Return the request of `kubectl drain` for a pod."""
    return {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}


def measure(server: Cluster, folder: Path) -> Document:
    """Play all parts, and return what the jobs of each went through."""
    with stage(server, NAMESPACE, folder, nodeGroups=[GROWS]) as (lives, _):
        return {each.__name__: each(lives) for each in (tainted, autoscaled, backfilled, elastic, shrunk)}


@contextmanager
def autoscalers(server: Cluster, pools: Sequence[Document], status: str) -> Iterator[None]:
    """Kinds and objects that Karpenter and Cluster Autoscaler would have on a cluster."""
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    names = {"plural": "nodepools", "kind": "NodePool", "listKind": "NodePoolList", "singular": "nodepool"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    spec = {"group": "karpenter.sh", "scope": "Cluster", "names": names, "versions": [version]}
    kind = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "spec": spec}
    server.expect("POST", definitions, {**kind, "metadata": {"name": "nodepools.karpenter.sh"}})
    config_map = {"metadata": {"name": "cluster-autoscaler-status"}, "data": {"status": status}}
    maps, made = "/api/v1/namespaces/kube-system/configmaps", "/apis/karpenter.sh/v1/nodepools"
    try:
        server.expect("POST", maps, {"apiVersion": "v1", "kind": "ConfigMap", **config_map})
        server.until(lambda: server.request("GET", made)[0] == 200, 30, "the server knows NodePools")
        for pool in pools:
            server.expect("POST", made, pool)
        yield
    finally:
        server.request("DELETE", f"{maps}/cluster-autoscaler-status")
        server.request("DELETE", f"{definitions}/nodepools.karpenter.sh")


def groups_read_by(server: Cluster, user: str) -> tuple[Settings, tuple[str, ...]]:
    """What an operator with the rights of a user learns of autoscalers."""

    async def read() -> tuple[Settings, tuple[str, ...]]:
        client = await Client.connect(server.kubeconfig(user))
        try:
            return await read_live_groups(client, Settings())
        finally:
            await client.close()

    return asyncio.run(read())


if __name__ == "__main__":
    sys.exit(write_measured(measure, NAMESPACE))
