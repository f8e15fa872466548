"""Jobs that began before their turn give their room back, whatever happens meanwhile; the cluster is simulated."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from rlhf_api.status import Progress, SavedState
from rlhf_operator.reconcile import line
from rlhf_operator.times import timestamp
from tests.operator.shared_cluster import SharedCluster
from tests.operator.test_node_groups_that_grow import settings
from tests.operator.test_small_jobs_begin_before_their_turn import WORKERS, begun, cluster_of, job, nodes_of, outcomes


def with_a_guest(cluster: SharedCluster) -> None:
    """One job runs, a large one waits for all nodes, and a short one is submitted."""
    for name, made in (("runs", job(3, steps=10_000)), ("large", job(4))):
        cluster.submit(name, made)
        cluster.settle()
    cluster.submit("short", job(1, steps=50))


def test_a_kill_before_its_rayjob_leaves_it_a_guest(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(4)
    with_a_guest(cluster)
    with monkeypatch.context() as killed:
        killed.setattr(SharedCluster, "_create", lambda *_: None)
        cluster.pass_over_all()
    assert cluster.status("short").attempts[-1].outcome == "Starting"
    cluster.start_operator()
    cluster.settle()
    cluster.end("runs-a1")
    cluster.settle()
    cluster.wait(3600)
    assert (begun(cluster, "large"), outcomes(cluster, "short")) == ([True], ["Yielded"])


@pytest.mark.parametrize(("saved_step", "ends"), [(4, True), (3, False)])
def test_a_checkpoint_that_is_a_step_behind_is_enough(saved_step: int, ends: bool) -> None:
    """A trainer tells of a checkpoint one step later; steps are longer than the grace period."""
    cluster = cluster_of(4)
    with_a_guest(cluster)
    cluster.settle()
    now, status = timestamp(cluster.now), cluster.status("short")
    progress = Progress(step=5, total_steps=50, stage="SFT", step_seconds=200.0, last_step_time=now)
    saved = SavedState(step=saved_step, uri="pvc://x/y", time=now)
    first = status.attempts[-1].model_copy(update={"first_step": 0})
    cluster.write(
        cluster.home("short"),
        status.model_copy(update={"attempts": (first,), "progress": progress, "checkpoint": saved}),
    )
    cluster.end("runs-a1")
    cluster.settle()
    cluster.wait(600)
    assert (begun(cluster, "large"), outcomes(cluster, "short")) == ([ends], ["Yielded" if ends else "Running"])


def test_a_guest_before_the_first_does_not_shield_a_later_one() -> None:
    cluster = cluster_of(3)

    def submit(name: str, made: dict[str, Any]) -> None:
        cluster.submit(name, made)
        cluster.settle()
        cluster.now += timedelta(seconds=5)

    def resume(name: str) -> None:
        document = cluster.objects["jobs"][cluster.home(name)]
        spec = {key: value for key, value in document["spec"].items() if key != "suspend"}
        cluster.put("jobs", {**document, "spec": spec, "metadata": {**document["metadata"], "generation": 2}})
        cluster.settle()
        cluster.now += timedelta(seconds=5)

    submit("runs", job(1, steps=10_000))
    submit("wide", job(3))
    submit("older", {**job(1, steps=40), "suspend": True})
    submit("first", {**job(1, steps=100_000), "suspend": True})
    submit("younger", job(1, steps=40))
    resume("older")
    resume("first")
    assert begun(cluster, "wide", "older", "first", "younger") == [False, True, False, True]
    cluster.remove("jobs", cluster.objects["jobs"][cluster.home("wide")])
    cluster.settle()
    cluster.wait(3600)
    assert (begun(cluster, "first"), outcomes(cluster, "younger")) == ([True], ["Yielded"])


def test_nodes_that_are_yet_to_come_do_not_replace_a_guests_room() -> None:
    group = {"name": "g", "max": 4, "matchLabels": WORKERS, "cpu": "4", "memory": "512Gi"}
    cluster = SharedCluster(nodes_of(3), settings=settings(group))
    for name, made in (("runs", job(2, steps=10_000)), ("first", job(3)), ("long", job(1, steps=50_000_000))):
        cluster.submit(name, made)
        cluster.settle()
    assert begun(cluster, "runs", "first", "long") == [True, False, False]
    cluster.end("runs-a1")
    cluster.settle()
    cluster.wait(3600)
    assert outcomes(cluster, "first") == ["Running"], "it has the existing nodes"


def test_a_guest_leaves_where_a_node_would_be_added_else() -> None:
    group = {"name": "g", "max": 4, "matchLabels": WORKERS, "cpu": "4", "memory": "512Gi"}
    cluster = SharedCluster(nodes_of(3), settings=settings(group))
    for name, made in (("runs", job(2, steps=10_000)), ("first", job(3)), ("short", job(1, steps=50))):
        cluster.submit(name, made)
        cluster.settle()
    assert begun(cluster, "runs", "first", "short") == [True, False, True]
    cluster.wait(line.BINDING_SECONDS)
    cluster.end("runs-a1")
    cluster.settle()
    assert [each.node for each in cluster.status("first").reserved] == ["heads", "node-0", "node-1", "node-2"]
    assert outcomes(cluster, "short") == ["Yielded"]
