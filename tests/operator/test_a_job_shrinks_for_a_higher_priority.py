"""A job on more nodes than it needs gives some to a job of higher priority, and takes them back; simulated cluster.

A node has room for one worker pod; head pods have a node of their own.
"""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_api.status import Progress, SavedState
from rlhf_operator.times import timestamp
from tests.operator.shared_cluster import SharedCluster
from tests.operator.test_small_jobs_begin_before_their_turn import begun, cluster_of, job, outcomes, told


def cluster_with_classes(nodes: int) -> SharedCluster:
    cluster = cluster_of(nodes)
    for name, value in (("low", -10), ("high", 10)):
        cluster.put("priorities", {"metadata": {"name": name, "uid": name}, "value": value})
    return cluster


def elastic(fewest: int, most: int, priority: str = "low", **fields: Any) -> dict[str, Any]:
    """A job on as many nodes as there are within these limits."""
    made = job(fewest, steps=10_000, **fields)
    made["resources"]["maxNodes"] = most
    return with_priority(made, priority)


def with_priority(made: dict[str, Any], priority: str) -> dict[str, Any]:
    made["runtime"]["worker"]["template"]["spec"]["priorityClassName"] = priority
    return made


def submit(cluster: SharedCluster, name: str, made: dict[str, Any]) -> None:
    cluster.submit(name, made)
    cluster.settle()


def train(cluster: SharedCluster, name: str, step: int, saved: int = 0, seconds: float = 200.0) -> None:
    """The current attempt reports so many steps of so many seconds, and a checkpoint."""
    now, status = timestamp(cluster.now), cluster.status(name)
    progress = Progress(step=step, total_steps=10_000, stage="SFT", step_seconds=seconds, last_step_time=now)
    checkpoint = SavedState(step=saved, uri="pvc://x/y", time=now) if saved else status.checkpoint
    last = status.attempts[-1]
    record = last.model_copy(update={"first_step": step if last.first_step is None else last.first_step})
    changes = {"attempts": (*status.attempts[:-1], record), "progress": progress, "checkpoint": checkpoint}
    cluster.write(cluster.home(name), status.model_copy(update=changes))
    cluster.settle()


def nodes_held(cluster: SharedCluster, name: str) -> int:
    mapping = cluster.status(name).mapping
    assert mapping
    return mapping.nodes


def test_both_run_side_by_side_after_the_next_checkpoint() -> None:
    cluster = cluster_with_classes(4)
    submit(cluster, "big", elastic(1, 4))
    train(cluster, "big", step=1)
    submit(cluster, "urgent", with_priority(job(2), "high"))
    train(cluster, "big", step=9, saved=4)
    cluster.wait(600)
    assert (begun(cluster, "urgent"), outcomes(cluster, "big")) == ([False], ["Running"]), "no step is lost"
    train(cluster, "big", step=10, saved=9)
    cluster.wait(600)
    assert begun(cluster, "urgent", "big") == [True, True]
    assert (outcomes(cluster, "big"), nodes_held(cluster, "big")) == (["Resized", "Running"], 2)
    assert cluster.status("big").attempts[0].message == (
        "Attempt 1 gives 2 of its 4 nodes to team/urgent, which has a higher priority; it goes on with 2."
    )
    assert cluster.status("big").failed_attempts == 0
    assert not cluster.status("big").attempts[-1].backfilled
