"""Real pods of a job are killed, one way a test: the job succeeds from its last checkpoint, and its status says why.

The operator runs on node 0, which has the control plane too.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cluster import chart, golden_path
from tests.cluster.client import Cluster
from tests.cluster.golden_path import HEAD, JOBS, PPO, SFT, WORKER, Document

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, SAVED_EVERY = 100, 5
FEWER = 20
"""Of a job in which no attempt is lost."""
KEPT, LOST = "node0", "node1"
OUT_OF_SERVICE = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
GPU, PRODUCT = "nvidia.com/gpu", "NVIDIA-A100-SXM4-80GB"


@pytest.fixture(scope="module")
def operated(pods_cluster: Cluster) -> Cluster:
    """The cluster with the chart installed."""
    chart.install(pods_cluster, {"nodeSelector": {"kubernetes.io/hostname": KEPT}})
    return pods_cluster


def is_past_checkpoint(found: Document) -> bool:
    """Whether there is a checkpoint, and a step after it."""
    return golden_path.step(found) > golden_path.saved_step(found) > 0


def begin(cluster: Cluster, namespace: str) -> Document:
    """Start SFT of example 01 and wait until there is something to lose: its status then."""
    cluster.offer_volumes()
    golden_path.apply(cluster, namespace, golden_path.shortened({SFT: STEPS}, every_steps=SAVED_EVERY))
    return golden_path.until(cluster, namespace, SFT, is_past_checkpoint, 600)


def succeed(cluster: Cluster, namespace: str) -> list[Document]:
    """Wait for the end, in which every step was made once and nothing runs any more: the attempts."""
    found = golden_path.succeeded(cluster, namespace, SFT, 900)
    metrics = cluster.folder_of_claim(namespace, f"{SFT}-output") / SFT / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    cluster.until(lambda: not golden_path.pods(cluster, namespace, SFT), 120, "no pod is left")
    attempts: list[Document] = found["attempts"]
    return attempts


def assert_resumed(attempts: list[Document], saved: int) -> None:
    """The second and last attempt went on from this checkpoint or a later one."""
    first, second = attempts
    assert second["outcome"] == "Succeeded"
    assert saved <= first["lastStep"], "as far as the operator heard: a node may be lost with the last words"
    assert saved <= second["firstStep"] < STEPS
    assert second["firstStep"] % SAVED_EVERY == 0


@pytest.mark.parametrize(("role", "reason"), [(WORKER, "WorkerLost"), (HEAD, "HeadLost")])
def test_a_killed_pod_costs_an_attempt(operated: Cluster, pods_namespace: str, role: str, reason: str) -> None:
    saved = golden_path.saved_step(begin(operated, pods_namespace))
    (pod,) = golden_path.pods(operated, pods_namespace, SFT, role)
    golden_path.kill_pod(pod)
    attempts = succeed(operated, pods_namespace)
    assert (attempts[0]["outcome"], attempts[0]["reason"], attempts[0]["counted"]) == ("Failed", reason, True)
    assert pod["metadata"]["name"] in attempts[0]["message"]
    assert_resumed(attempts, saved)


def test_a_killed_pod_of_the_rollout_pool_costs_no_attempt(operated: Cluster, pods_namespace: str) -> None:
    """KubeRay makes another one, and the trainer generates there what was under way."""
    operated.offer_volumes(2)
    golden_path.apply(operated, pods_namespace, generating_apart())
    found = golden_path.until(operated, pods_namespace, PPO, is_past_checkpoint, 600)
    assert [(pool["name"], pool["models"]) for pool in found["mapping"]["pools"]] == [
        ("train", ["actor"]),
        ("writers", ["rollout"]),
    ]
    (pod,) = (
        each
        for each in golden_path.pods(operated, pods_namespace, PPO, WORKER)
        if each["metadata"]["labels"]["ray.io/group"] == "writers"
    )
    golden_path.kill_pod(pod)
    (attempt,) = golden_path.succeeded(operated, pods_namespace, PPO, 900)["attempts"]
    assert (attempt["outcome"], attempt["firstStep"], attempt["lastStep"]) == ("Succeeded", 0, FEWER)
    metrics = operated.folder_of_claim(pods_namespace, f"{PPO}-output") / PPO / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, FEWER + 1))
    assert max(record["staleness"] for record in records) == 1
    times = sum(record["rollout_replacements"] for record in records)
    assert times in (1, 2), "Ray may put new processes on the lost pod, as long as it does not know of that"


def test_an_elastic_pool_loses_no_row_with_its_pods(operated: Cluster, pods_namespace: str) -> None:
    """The pool takes a second node, as the trainer waits; then a pod is killed, and KubeRay makes a new one."""
    operated.offer_volumes(2)
    jobs = generating_apart(STEPS)
    spec = jobs[PPO]["spec"]
    spec["placement"]["pools"][1]["maxNodes"] = 2
    spec["rollout"] = {"samplesPerPrompt": 4, "keep": 1.0}
    golden_path.apply(operated, pods_namespace, jobs)
    golden_path.until(operated, pods_namespace, PPO, uses_two_nodes, 600)
    writers = [
        each
        for each in golden_path.pods(operated, pods_namespace, PPO, WORKER)
        if each["metadata"]["labels"]["ray.io/group"] == "writers"
    ]
    golden_path.kill_pod(writers[0])
    (attempt,) = golden_path.succeeded(operated, pods_namespace, PPO, 900)["attempts"]
    assert (attempt["outcome"], attempt["firstStep"], attempt["lastStep"]) == ("Succeeded", 0, STEPS)
    folder = operated.folder_of_claim(pods_namespace, f"{PPO}-output") / PPO
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert {record["rollout_nodes"] for record in records} == {1, 2}
    assert sum(record["rollout_resizes"] for record in records) >= 2, "it grew, and lost a pod"
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().split("\n")[:-1]]
    learned = sorted((row["step"], row["row"]) for row in rows)
    assert learned == [(step, row) for step in range(1, STEPS + 1) for row in range(8 * 4)], "each once"


def uses_two_nodes(found: Document) -> bool:
    """Whether the trainer generates on two nodes of the elastic pool."""
    return any((each["name"], float(each["value"])) == ("rollout_nodes", 2.0) for each in found.get("metrics", []))


def generating_apart(steps: int = FEWER) -> dict[str, Document]:
    """GRPO by a rule on what a short SFT made, with a pool that generates and works ahead."""
    jobs = golden_path.shortened({SFT: SAVED_EVERY, PPO: steps}, every_steps=SAVED_EVERY)
    spec = jobs[PPO]["spec"]
    spec["algorithm"] = {"name": "GRPO", "kl": {"coefficient": 0.0}}
    spec["models"] = {"actor": spec["models"]["actor"], "reward": {"entrypoint": "rlhf_examples.helpful.rule:score"}}
    spec["rollout"] = {"samplesPerPrompt": 4, "maxStaleness": 1, "weightSync": "Delta"}
    spec["training"] = {"totalSteps": steps, "promptBatchSize": 8}
    del spec["resources"]
    pools = {"train": "actor", "writers": "rollout"}
    spec["placement"] = {
        "mode": "Manual",
        "pools": [{"name": name, "models": [model], "slotsPerNode": 1} for name, model in pools.items()],
    }
    return jobs


def test_training_goes_on_while_the_operator_is_killed(operated: Cluster, pods_namespace: str) -> None:
    begin(operated, pods_namespace)
    (pod,) = operated.items(f"/api/v1/namespaces/{chart.NAMESPACE}/pods")
    golden_path.kill_pod(pod)
    (attempt,) = succeed(operated, pods_namespace)
    assert (attempt["outcome"], attempt["firstStep"], attempt["lastStep"]) == ("Succeeded", 0, STEPS)


def test_a_lost_node_is_not_held_against_the_job(operated: Cluster, pods_namespace: str) -> None:
    with only_on_the_other_node(operated):
        saved = golden_path.saved_step(begin(operated, pods_namespace))
    operated.kill_node(1)
    try:
        golden_path.until(operated, pods_namespace, SFT, lambda found: found["attempts"][0]["outcome"] == "Failed", 300)
        taint(operated, LOST, OUT_OF_SERVICE)
        attempts = succeed(operated, pods_namespace)
    finally:
        taint(operated, LOST)
        operated.start_node(1)
    assert (attempts[0]["reason"], attempts[0]["node"], attempts[0]["counted"]) == ("NodeLost", LOST, False)
    assert_resumed(attempts, saved)


def test_a_suspended_job_goes_on_where_it_was_stopped(operated: Cluster, pods_namespace: str) -> None:
    begin(operated, pods_namespace)
    path = f"{JOBS.format(pods_namespace)}/{SFT}"
    operated.expect("PATCH", path, {"spec": {"suspend": True}})
    resting = golden_path.until(operated, pods_namespace, SFT, lambda found: found["phase"] == "Suspended", 300)
    assert not golden_path.pods(operated, pods_namespace, SFT)
    (stopped,) = resting["attempts"]
    assert stopped["outcome"] == "Suspended"
    operated.expect("PATCH", path, {"spec": {"suspend": False}})
    first, second = succeed(operated, pods_namespace)
    assert (first["outcome"], second["outcome"]) == ("Suspended", "Succeeded")
    assert second["firstStep"] >= first["lastStep"], "the pods saved a checkpoint when they were told to end"


def test_a_job_is_mapped_onto_the_gpus_that_nodes_have(operated: Cluster, pods_namespace: str) -> None:
    """The GPUs are invented: the pods are made and never begin, for their scheduler does not exist."""
    operated.offer_volumes()
    jobs = golden_path.shortened({SFT: STEPS}, every_steps=SAVED_EVERY)
    jobs[SFT]["spec"]["resources"] = {"device": "GPU", "nodes": 2}
    template = {"spec": {"schedulerName": "nobody"}}
    # As much as the nodes have.
    jobs[SFT]["spec"].setdefault("runtime", {})["worker"] = {"cpu": "100m", "memory": "1Gi", "template": template}
    with invented_gpus(operated):
        golden_path.apply(operated, pods_namespace, jobs)
        found = golden_path.until(operated, pods_namespace, SFT, lambda found: found.get("rayJobName"), 60)
        workers = operated.until(lambda: golden_path.pods(operated, pods_namespace, SFT, WORKER), 60, "workers")
        operated.expect("DELETE", f"{JOBS.format(pods_namespace)}/{SFT}")
        operated.until(lambda: not golden_path.pods(operated, pods_namespace, SFT), 120, "no pod is left")
    (pool,) = found["mapping"]["pools"]
    assert (found["mapping"]["device"], found["mapping"]["slots"]) == ("GPU", 16)
    assert (pool["nodes"], pool["slotsPerNode"], pool["gpu"]) == (2, 8, "a100-80g")
    assert workers[0]["spec"]["containers"][0]["resources"]["limits"][GPU] == "8"
    assert PRODUCT in json.dumps(workers[0]["spec"]["affinity"])


@contextmanager
def only_on_the_other_node(cluster: Cluster) -> Iterator[None]:
    """No new pod goes to node 0 meanwhile."""
    cluster.kubectl("cordon", KEPT)
    try:
        yield
    finally:
        cluster.kubectl("uncordon", KEPT)


def taint(cluster: Cluster, node: str, *taints: Document) -> None:
    """These are all the taints of a node that an administrator has put there."""
    path = f"/api/v1/nodes/{node}"
    others = [
        each for each in cluster.expect("GET", path)["spec"].get("taints", []) if each["key"] != OUT_OF_SERVICE["key"]
    ]
    cluster.expect("PATCH", path, {"spec": {"taints": [*others, *taints]}})


@contextmanager
def invented_gpus(cluster: Cluster) -> Iterator[None]:
    """Both nodes say that they have eight GPUs."""

    def say(amount: str | None, product: str | None) -> None:
        for node in (KEPT, LOST):
            cluster.expect("PATCH", f"/api/v1/nodes/{node}", {"metadata": {"labels": {f"{GPU}.product": product}}})
            amounts = {"capacity": {GPU: amount}, "allocatable": {GPU: amount}}
            cluster.expect("PATCH", f"/api/v1/nodes/{node}/status", {"status": amounts})

    say("8", PRODUCT)
    try:
        yield
    finally:
        say(None, None)
