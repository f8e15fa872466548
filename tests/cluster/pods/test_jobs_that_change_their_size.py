"""Jobs that change their size on real pods: rollout pools that grow, lose pods and shrink; a job that gives a node.

A node of two CPUs has room for two workers of 700m, or for one of 1100m beside heads.
"""

import json
import random
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import chart, golden_path
from tests.cluster.client import Cluster
from tests.cluster.clusters import evicting
from tests.cluster.golden_path import JOBS, PPO, SFT, WORKER, Document
from tests.cluster.pods.test_kills_on_pods import generating_apart
from tests.cluster.pods.test_own_code_from_a_configmap import runtime_of_the_page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]

SCHEDULES, ENDLESS = 20, 100_000
POOL, MOST, ROWS = "writers", 2, 8 * 4
PRIORITY = {"metadata": {"name": "urgent"}, "value": 1000}
BIG, URGENT, ALONE = "gives-a-node", "urgent", "undisturbed"
SECONDS_A_STEP = 8
SLOW = """
import os
import time

import rlhf


class Slow(rlhf.Algorithm):
    \"\"\"SFT whose steps take a while.\"\"\"

    @staticmethod
    def step(completions: rlhf.B, *, actor: rlhf.SupervisedActor[rlhf.B]) -> None:
        time.sleep(float(os.environ.get("PAUSE", "0")))
        actor.update_actor(completions)
"""


@pytest.fixture(scope="module")
def operated(pods_cluster: Cluster) -> Cluster:
    """The cluster with the chart installed."""
    chart.install(pods_cluster, {"nodeSelector": {"kubernetes.io/hostname": "node0"}})
    return pods_cluster


class Followed:
    """A job that is followed by its files and its status."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name
        self._folder: Path | None = None
        self.warned: set[str] = set()
        """Warnings that the status has shown; it keeps the last ones only."""

    @property
    def folder(self) -> Path:
        """Folder with the files of the job."""
        self._folder = self._folder or self.cluster.folder_of_claim(self.namespace, f"{self.name}-output") / self.name
        return self._folder

    @property
    def path(self) -> str:
        """Path of the job in the API."""
        return f"{JOBS.format(self.namespace)}/{self.name}"

    def read(self, name: str) -> list[Document]:
        """Lines of a file that are whole; none before the file is there."""
        file = self.folder / name
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]  # responses have other ends of lines

    def steps(self) -> list[Document]:
        """Records of the steps."""
        return self.read("metrics.jsonl")

    def total(self, name: str) -> int:
        """Sum of a metric over all steps."""
        return int(sum(record[name] for record in self.steps()))

    def until(self, condition: Callable[[Document], object]) -> Document:
        """Status of the job as soon as a condition holds."""

        def seen(found: Document) -> object:
            self.warned.update(found.get("warnings", ()))
            return condition(found)

        return golden_path.until(self.cluster, self.namespace, self.name, seen, 600)

    def until_step(self, step: int) -> Document:
        return self.until(lambda found: golden_path.step(found) >= step)

    def suspend(self) -> Document:
        """Suspend the job: its status once no pod is left."""
        self.cluster.expect("PATCH", self.path, {"spec": {"suspend": True}})
        return self.until(lambda found: found["phase"] == "Suspended")


class Pool(Followed):
    """Elastic pool of a job, with what happens to it."""

    def __init__(self, cluster: Cluster, namespace: str, seed: int) -> None:
        super().__init__(cluster, namespace, PPO)
        self._random, self._guests = random.Random(seed), iter(range(10 * SCHEDULES))

    def schedule(self) -> Iterator[tuple[str, int]]:
        """Grow and lose one or both pods; before or after that the pool may grow again and shrink, or be drained."""
        kinds: list[Callable[[], None]] = [self._lose_pods]
        kinds += [each for each in (self._give_to_a_guest, self._evict) if self._random.random() < 0.25]
        for change in self._random.sample(kinds, len(kinds)):
            self.grow()
            at = self.steps()[-1]["step"]
            time.sleep(self._random.uniform(0, 3))  # anywhere in a step
            before = self._changes()
            change()
            self._await_change(before)
            yield change.__name__, at

    def _await_change(self, before: int) -> None:
        self.until(lambda _: self._changes() > before)

    def grow(self) -> None:
        """Wait until the trainer uses all nodes."""
        self.until(lambda _: [each["rollout_nodes"] for each in self.steps()[-1:]] == [MOST])

    def _changes(self) -> int:
        return self.total("rollout_resizes") + self.total("rollout_replacements")

    def _pods(self) -> list[Document]:
        """Pods of the pool that stay."""
        workers = golden_path.pods(self.cluster, self.namespace, self.name, WORKER)
        own = [each for each in workers if each["metadata"]["labels"]["ray.io/group"] == POOL]
        return [each for each in own if "deletionTimestamp" not in each["metadata"]]

    def _lose_pods(self) -> None:
        pods = self._pods()
        for pod in self._random.sample(pods, min(self._random.choice([1, 1, MOST]), len(pods))):
            golden_path.kill_pod(pod)

    def _evict(self) -> None:
        name = self._random.choice(self._pods())["metadata"]["name"]
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
        self.cluster.expect("POST", path, evicting(name))

    def _give_to_a_guest(self) -> None:
        """A job that lacks room gets a node of the pool, for both of its pods, and goes again."""
        name = f"guest-{next(self._guests)}"
        job = golden_path.shortened({SFT: 5}, every_steps=5)[SFT] | {"metadata": {"name": name}}
        job["spec"]["resources"] = {"device": "CPU", "slotsPerNode": 1}
        job["spec"]["runtime"] = {"controller": {"cpu": "300m"}, "worker": {"cpu": "700m"}}
        self.cluster.offer_volumes()
        golden_path.apply(self.cluster, self.namespace, {name: job})
        golden_path.until(self.cluster, self.namespace, name, lambda found: found.get("reserved"), 600)
        self.until(lambda _: self.steps()[-1]["rollout_nodes"] == 1)
        self.cluster.expect("DELETE", f"{JOBS.format(self.namespace)}/{name}")
        self.cluster.until(lambda: not golden_path.pods(self.cluster, self.namespace, name), 120, f"{name} is gone")


def test_no_random_schedule_loses_a_row(operated: Cluster, pods_namespace: str) -> None:
    """20 schedules one after the other in one job, each with its own growth and loss; then suspended and resumed."""
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    operated.offer_volumes(2)
    jobs = generating_apart(ENDLESS)
    spec = jobs[PPO]["spec"]
    spec["placement"]["pools"][1]["maxNodes"] = MOST
    spec["rollout"] |= {"keep": 1.0}
    spec["runtime"] = {"worker": {"cpu": "700m"}}
    golden_path.apply(operated, pods_namespace, jobs)
    golden_path.succeeded(operated, pods_namespace, SFT)
    job = Pool(operated, pods_namespace, seed)
    job.until_step(1)
    for number in range(SCHEDULES):
        print(f"schedule {number}: {list(job.schedule())}", flush=True)
    asked = job.steps()[-1]["step"]
    stopped = job.suspend()
    operated.expect("PATCH", job.path, {"spec": {"suspend": False}})
    found = job.until_step(golden_path.step(stopped) + 5)
    first, second = found["attempts"]
    assert (first["outcome"], second["outcome"]) == ("Suspended", "Running")
    assert asked <= second["firstStep"] <= first["lastStep"], "steps between the checkpoint and the end are made again"
    records = job.steps()
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert max(record["staleness"] for record in records) == 1
    learned = sorted((row["step"], row["row"]) for row in job.read("rollouts.jsonl") if row["step"] <= len(records))
    assert learned == [(record["step"], row) for record in records for row in range(ROWS)], "each once"
    names = ("rollout_resizes", "rollout_replacements", "rollout_repeated_rows")
    print(len(records), "steps", {name: job.total(name) for name in names})
    assert {"rollout_nodes", *names} <= {each["name"] for each in found["metrics"]}
    repeated = [(record["step"], rows) for record in records if (rows := record["rollout_repeated_rows"])]
    sentences = [f"step {step}: {told(rows)}" for step, rows in repeated]
    events = (job.folder / "events.log").read_text()
    assert all(each in events for each in sentences), "what it cost"
    assert job.warned.intersection(sentences), "the status told it"


def test_a_job_gives_a_node_to_an_urgent_one(operated: Cluster, pods_namespace: str) -> None:
    """It gives one of two nodes at a checkpoint and takes it back later; its losses are those of one node."""
    operated.request("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", PRIORITY)  # again is no harm
    operated.kubectl("create", "configmap", "my-code", f"--from-literal=slow.py={SLOW}", "-n", pods_namespace)
    operated.offer_volumes(3)
    golden_path.apply(operated, pods_namespace, {BIG: slow_job(BIG, most=2, pause=SECONDS_A_STEP)})
    big = Followed(operated, pods_namespace, BIG)
    big.until_step(3)
    urgent = golden_path.shortened({SFT: 5}, every_steps=5)[SFT] | {"metadata": {"name": URGENT}}
    urgent["spec"]["resources"] = {"device": "CPU", "slotsPerNode": 1}
    worker = {"cpu": "1100m", "template": {"spec": {"priorityClassName": "urgent"}}}
    urgent["spec"]["runtime"] = {"controller": {"cpu": "200m"}, "worker": worker}
    golden_path.apply(operated, pods_namespace, {URGENT: urgent})
    (attempt,) = golden_path.succeeded(operated, pods_namespace, URGENT)["attempts"]
    assert attempt["outcome"] == "Succeeded"
    big.until(has_begun_anew)
    attempts = big.suspend()["attempts"]
    print([(each["outcome"], each["slots"], each["firstStep"], each["lastStep"]) for each in attempts])
    assert [(each["outcome"], each["slots"]) for each in attempts] == [("Resized", 2), ("Resized", 1), ("Suspended", 2)]
    assert [each["firstStep"] for each in attempts] == [0, *(each["lastStep"] for each in attempts[:-1])], "none lost"
    records = big.steps()
    assert [record["step"] for record in records] == list(range(1, attempts[-1]["lastStep"] + 1))
    golden_path.apply(operated, pods_namespace, {ALONE: slow_job(ALONE, most=1, pause=0)})
    alone = Followed(operated, pods_namespace, ALONE)
    alone.until_step(len(records))
    for record, other in zip(records, alone.steps(), strict=False):
        for name in ("loss/sft", "grad_norm/sft"):
            assert record[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), (record["step"], name)


def has_begun_anew(found: Document) -> bool:
    """Whether the third attempt has made a step."""
    third = found["attempts"][2:]
    return bool(third) and golden_path.step(found) > third[0].get("firstStep", ENDLESS)


def told(rows: float) -> str:
    """The warning of a step."""
    return f"rollout pool {POOL} lost processes; {rows:.0f} rows were generated again"


def slow_job(name: str, *, most: int, pause: float) -> Document:
    """SFT with steps of so many seconds, on one to `most` nodes with a slot each."""
    job = golden_path.shortened({SFT: ENDLESS}, every_steps=2)[SFT] | {"metadata": {"name": name}}
    runtime = runtime_of_the_page()
    runtime["env"].append({"name": "PAUSE", "value": str(pause)})
    runtime["controller"]["cpu"], runtime["worker"]["cpu"] = "200m", "1100m"
    job["spec"] |= {
        "algorithm": {"name": "Custom", "entrypoint": "slow:Slow"},
        "resources": {"device": "CPU", "nodes": 1, "maxNodes": most, "slotsPerNode": 1},
        "runtime": runtime,
    }
    return job
