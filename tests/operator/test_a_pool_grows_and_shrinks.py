"""An elastic rollout pool gets idle nodes and gives them to any job that waits; the cluster is simulated."""

from __future__ import annotations

from typing import Any

from rlhf_operator.snapshot import Capability
from tests.operator.elastic_cluster import ElasticCluster, elastic, resizes
from tests.operator.test_small_jobs_begin_before_their_turn import begun, job


def running(workers: int = 4, *more: Capability, **fields: Any) -> ElasticCluster:
    """A cluster on which the job `grows` has made its first steps."""
    cluster = ElasticCluster(workers, *more)
    cluster.submit("grows", elastic(**fields))
    cluster.settle()
    cluster.step("grows", 3)
    assert cluster.status("grows").phase == "Running"
    return cluster


def test_it_grows_while_the_trainer_waits_and_nodes_are_idle() -> None:
    cluster = running()
    cluster.step("grows", trainer=0.31)
    assert (cluster.pool("grows").wanted_nodes, len(cluster.running("grows"))) == (2, 2)
    assert resizes(cluster.events) == ["Pool writers: 1 -> 2 nodes, because the trainer waited 31 % of step 4."]
    cluster.step("grows", 10, trainer=0.31)
    assert (cluster.pool("grows").wanted_nodes, len(cluster.running("grows"))) == (3, 3)
    cluster.step("grows", 10, trainer=0.31)
    assert cluster.status("grows").phase == "Running"
    assert len(resizes(cluster.events)) == 2, "three is the most"


def test_a_job_that_waits_gets_the_extra_nodes_at_once() -> None:
    cluster = running()
    cluster.step("grows", 20, trainer=0.5)
    assert len(cluster.running("grows")) == 3
    cluster.submit("small", job(1))
    cluster.settle()
    assert begun(cluster, "small") == [True]
    assert len(cluster.running("grows")) == 2, "one node was enough"
    assert resizes(cluster.events)[-1] == "Pool writers: 3 -> 2 nodes, because team/small waits for room."
    cluster.step("grows", 20, trainer=0.5)
    assert len(cluster.running("grows")) == 2, "no node is free"
    cluster.end("small-a1")
    cluster.settle()
    cluster.wait(60)
    cluster.step("grows", 5, trainer=0.5)
    assert len(cluster.running("grows")) == 3
