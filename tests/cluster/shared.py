"""More jobs than there is room for, on one made-up node with two CPUs for workers.

`python -m tests.cluster.shared FILE` starts a cluster for it, and writes as JSON who had which turn.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.api_world import write_measured
from tests.cluster.client import Cluster
from tests.cluster.lifecycle import SECONDS, Document
from tests.cluster.stage import Lives, small_job, stage

POOL, ROOM, JOBS = "shared", 2, 12


@contextmanager
def two_places(server: Cluster) -> Iterator[None]:
    """A node with room for two workers is there meanwhile."""
    server.add_node(POOL, {"cpu": str(ROOM)}, {"pool": POOL})
    try:
        yield
    finally:
        server.remove_node(POOL)


def job(name: str, namespace: str, workers: int = 1) -> Document:
    """Its workers take a CPU each, on that node only; its head pod may be anywhere."""
    made = small_job(name, namespace)
    made["spec"]["resources"] = {"device": "CPU", "nodes": workers, "slotsPerNode": 1}
    template = {"spec": {"nodeSelector": {"pool": POOL}}}
    made["spec"]["runtime"] = {"worker": {"cpu": "1", "template": template}}
    return made


def turns(lives: Lives) -> Document:
    """How each attempt of twelve jobs ended, and whether any was seen to begin before an older one."""
    names = [f"turn-{number:02}" for number in range(JOBS)]
    lives.apply(*(job(name, lives.jobs.namespace) for name in names))
    finals, most, in_order = [], 0, True
    for place, name in enumerate(names):
        lives.train(name)
        begun = [each for each in names if lives.jobs.status(each).get("attempts")]
        in_order = in_order and begun == names[: len(begun)]
        most = max(most, len(begun) - place)
        finals.append(lives.succeed(name))
    outcomes = [[each["outcome"] for each in final["attempts"]] for final in finals]
    return {"outcomes": outcomes, "in_order": in_order, "most_at_once": most}


def pairs(lives: Lives) -> Document:
    """Two jobs that both need the whole room: what the second says while the first runs, and how both end.

    In between comes one of higher priority, which has its turn before the second.
    """
    names = ["pair-a", "pair-b"]
    lives.apply(*(job(name, lives.jobs.namespace, workers=ROOM) for name in names))
    lives.jobs.wait_for_pods(names[0], 1, 1 + ROOM)
    lives.jobs.wait_for(names[1], "Queued")
    reserved = lives.jobs.server.until(
        lambda: found if "1st in line" in (found := lives.jobs.condition(names[1], "QuotaReserved"))["message"] else {},
        SECONDS,
        f"{names[1]} is 1st in line",
    )
    urgent = job("urgent", lives.jobs.namespace, workers=ROOM)
    urgent["spec"]["runtime"]["worker"]["template"]["spec"]["priorityClassName"] = "system-cluster-critical"
    lives.apply(urgent)
    lives.jobs.wait_for("urgent", "Queued")
    pods = len(lives.jobs.pods(names[1]))
    finals = []
    for name in (names[0], "urgent", names[1]):
        lives.jobs.wait_for_pods(name, 1, 1 + ROOM)
        lives.jobs.server.until(lambda: lives.kubelets.trainer(name).document, SECONDS, f"{name} runs")  # noqa: B023
        finals.append(lives.succeed(name))
    outcomes = [[each["outcome"] for each in final["attempts"]] for final in finals]
    return {"outcomes": outcomes, "reason": reserved["reason"], "told": reserved["message"], "pods_meanwhile": pods}


def measure(server: Cluster, folder: Path) -> Document:
    """Play both parts, and return who had which turn."""
    with two_places(server), stage(server, POOL, folder) as (lives, _):
        return {"turns": turns(lives), "pairs": pairs(lives)}


if __name__ == "__main__":
    sys.exit(write_measured(measure, POOL))
