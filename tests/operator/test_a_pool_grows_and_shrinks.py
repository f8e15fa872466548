"""An elastic rollout pool gets idle nodes and gives them to any job that waits; the cluster is simulated."""

from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from rlhf_operator import names
from rlhf_operator.cluster import view
from rlhf_operator.snapshot import Capability
from tests.each import each_case
from tests.operator.elastic_cluster import ElasticCluster, elastic, resizes
from tests.operator.shared_cluster import node
from tests.operator.test_small_jobs_begin_before_their_turn import WORKERS, begun, job, outcomes

RESIZE_SECONDS = 600.0


def running(workers: int = 4, *more: Capability, labels: dict[str, str] | None = None, **fields: Any) -> ElasticCluster:
    """A cluster on which the job `grows` has made its first steps."""
    cluster = ElasticCluster(workers, *more)
    cluster.submit("grows", elastic(**fields), **(labels or {}))
    cluster.settle()
    cluster.step("grows", 3)
    assert cluster.status("grows").phase == "Running"
    return cluster


def grown(workers: int = 4, **fields: Any) -> ElasticCluster:
    """A cluster of `running` whose pool has grown to `maxNodes`, and may change its size again."""
    cluster = running(workers, **fields)
    cluster.step("grows", 20, trainer=0.5)
    cluster.step("grows", 4, trainer=0.07)
    return cluster


def size(cluster: ElasticCluster, name: str = "grows") -> tuple[int, int]:
    """(nodes that are wanted, pods that run)."""
    return cluster.pool(name).node_count, len(cluster.running(name))


def test_it_grows_while_the_trainer_waits_and_nodes_are_idle() -> None:
    cluster = running()
    assert size(cluster) == (1, 1)
    cluster.step("grows", trainer=0.31)
    assert size(cluster) == (2, 2)
    assert resizes(cluster.events) == ["Pool writers: 1 -> 2 nodes, because the trainer waited 31 % of step 4."]
    cluster.step("grows", 20, trainer=0.31)
    assert size(cluster) == (3, 3)
    assert len(resizes(cluster.events)) == 2, "three is the most"
    assert cluster.status("grows").phase == "Running"


def test_it_takes_allowed_sizes_only() -> None:
    training = {"totalSteps": 10_000, "promptBatchSize": 4}  # 16 responses: not for three engines
    cluster = running(6, most=4, training=training)
    cluster.step("grows", 20, trainer=0.31)
    assert [each.split(" nodes")[0] for each in resizes(cluster.events)] == [
        "Pool writers: 1 -> 2",
        "Pool writers: 2 -> 4",
    ]


def test_the_first_steps_of_an_attempt_say_nothing() -> None:
    cluster = ElasticCluster(4)
    cluster.submit("grows", elastic())
    cluster.settle()
    cluster.step("grows", 2, trainer=0.9)
    assert size(cluster) == (1, 1)


def test_an_attempt_is_not_judged_by_steps_of_the_last_one() -> None:
    cluster = running(2)
    cluster.step("grows", 20, trainer=0.9)
    cluster.end("grows-a1", "FAILED")
    cluster.settle()
    cluster.wait(300)
    cluster.put("nodes", node("new", 4, {}, **WORKERS))
    cluster.queue.add(cluster.home("grows"))
    cluster.settle()
    assert (cluster.status("grows").attempts[-1].first_step, size(cluster)) == (None, (1, 1))


def test_without_room_it_stays() -> None:
    cluster = running(2)
    cluster.step("grows", 20, trainer=0.9)
    assert (size(cluster), resizes(cluster.events)) == ((1, 1), [])


def test_a_step_with_another_size_than_wanted_says_nothing() -> None:
    cluster = running()
    cluster.step("grows", trainer=0.9)
    cluster.step("grows", 20, trainer=0.9, used=1)
    assert size(cluster) == (2, 2), "the trainer has not taken the second one up"


def test_a_job_that_waits_gets_extra_nodes_at_once() -> None:
    cluster = grown()
    cluster.submit("small", job(1))
    cluster.settle()
    assert begun(cluster, "small") == [True]
    assert size(cluster) == (2, 2), "one node was enough"
    assert resizes(cluster.events)[-1] == "Pool writers: 3 -> 2 nodes, because team/small waits for room."
    cluster.step("grows", 20, trainer=0.5)
    assert size(cluster) == (2, 2), "no node is free"
    cluster.end("small-a1")
    cluster.settle()
    cluster.wait(60)
    cluster.step("grows", 5, trainer=0.5)
    assert size(cluster) == (3, 3)


def test_a_large_job_gets_as_many_as_it_needs_in_one_go() -> None:
    cluster = grown()
    cluster.submit("large", job(2))
    cluster.settle()
    assert (begun(cluster, "large"), size(cluster)) == ([True], (1, 1))


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_pod_without_a_node_goes_before_one_that_runs(monkeypatch: pytest.MonkeyPatch, is_refused: bool) -> None:
    cluster = running(3, most=2)
    runs, told = cluster.running("grows")[0]["metadata"]["name"], ElasticCluster.resize
    with monkeypatch.context() as busy:
        busy.setattr(ElasticCluster, "schedule", lambda _: False)
        cluster.step("grows", trainer=0.5)
        refused = [None] * is_refused  # as a conflict does, the first time
        busy.setattr(ElasticCluster, "resize", lambda of, action: refused.pop() if refused else told(of, action))
        cluster.submit("small", job(1))
        cluster.pass_over_all()
        cluster.operate(cluster.home("grows"))
    assert runs not in cluster.told[-1].leaving
    assert cluster.told[-1].leaving, "KubeRay is told which pod goes"
    cluster.settle()
    assert ([each["metadata"]["name"] for each in cluster.running("grows")], begun(cluster, "small")) == (
        [runs],
        [True],
    )


def test_extra_nodes_that_would_not_suffice_stay() -> None:
    cluster = grown()
    cluster.submit("larger", job(3))
    cluster.settle()
    cluster.step("grows", 5, trainer=0.5)
    assert (begun(cluster, "larger"), size(cluster)) == ([False], (3, 3))


def test_a_pool_does_not_grow_where_a_job_waits() -> None:
    cluster = running()
    cluster.submit("larger", job(3))
    cluster.settle()
    cluster.step("grows", 20, trainer=0.5)
    assert (begun(cluster, "larger"), size(cluster)) == ([False], (1, 1))


def test_several_pools_give_together_what_one_cannot() -> None:
    cluster = ElasticCluster(6)
    for name in ("one", "two"):
        cluster.submit(name, elastic(most=2))
        cluster.settle()
        cluster.step(name, 4)
        cluster.step(name, 5, trainer=0.5)
    assert (size(cluster, "one"), size(cluster, "two")) == ((2, 2), (2, 2))
    cluster.submit("large", job(2))
    cluster.settle()
    assert begun(cluster, "large") == [True]
    assert (size(cluster, "one"), size(cluster, "two")) == ((1, 1), (1, 1))


def test_of_several_pools_no_more_give_than_are_needed() -> None:
    cluster = ElasticCluster(6)
    for name in ("one", "two"):
        cluster.submit(name, elastic(most=2))
        cluster.settle()
        cluster.step(name, 9, trainer=0.5)
    cluster.submit("small", job(1))
    cluster.settle()
    assert begun(cluster, "small") == [True]
    assert sorted((size(cluster, "one"), size(cluster, "two"))) == [(1, 1), (2, 2)]


def test_extra_nodes_go_before_a_guest_does() -> None:
    cluster = ElasticCluster(6)
    cluster.submit("runs", job(2, steps=10_000))
    cluster.submit("grows", elastic(most=2))
    cluster.settle()
    cluster.step("grows", 9, trainer=0.5)
    for name, made in (("large", job(3)), ("late", job(1, steps=50))):
        cluster.submit(name, made)
        cluster.settle()
    assert (begun(cluster, "large", "late"), size(cluster)) == ([False, True], (2, 2))
    cluster.end("runs-a1")
    cluster.operate(cluster.home("runs"))
    cluster.now += timedelta(seconds=60)
    cluster.operate(cluster.home("runs"))
    cluster.operate(cluster.home("late"))  # before the elastic pool is looked at
    cluster.settle()
    cluster.step("grows", 2)
    assert (begun(cluster, "large", "late"), size(cluster)) == ([True, True], (1, 1))
    assert outcomes(cluster, "late") == ["Running"]


def test_an_idle_pool_shrinks_and_does_not_grow_again_soon() -> None:
    cluster = grown()
    cluster.step("grows", pool=0.4)
    assert size(cluster) == (2, 2)
    assert resizes(cluster.events)[-1].startswith("Pool writers: 3 -> 2 nodes, because the pool waited 40 % of step ")
    cluster.step("grows", 49, trainer=0.5)
    assert size(cluster) == (2, 2)
    cluster.step("grows", 2, trainer=0.5)
    assert size(cluster) == (3, 3)


def test_a_pool_that_waits_beside_a_trainer_that_waits_stays() -> None:
    cluster = grown()
    cluster.step("grows", 10, pool=0.9, trainer=0.06)
    assert size(cluster) == (3, 3)


@each_case("seed", range(5))
def test_noise_does_not_make_it_flap(seed: int) -> None:
    cluster, noise = running(), random.Random(seed)
    for _ in range(50):
        cluster.step("grows", trainer=abs(noise.gauss(0.05, 0.1)), pool=abs(noise.gauss(0.3, 0.2)))
    sizes = [int(each.split("-> ")[1][0]) for each in resizes(cluster.events)]
    ways = [after > before for before, after in zip([1, *sizes], sizes, strict=False)]
    assert sum(one != other for one, other in pairwise(ways)) <= 1, sizes


def test_a_pod_that_vanishes_is_made_anew_and_nothing_is_said() -> None:
    cluster = grown()
    for _ in range(3):
        cluster.end_pod(cluster.running("grows")[0])
        cluster.settle()
    assert (size(cluster), cluster.status("grows").phase) == ((3, 3), "Running")
    cluster.step("grows", 5, trainer=0.07)
    assert (len(resizes(cluster.events)), cluster.status("grows").last_failure) == (2, None)


def test_its_pods_explain_no_failure_of_the_trainer() -> None:
    cluster = grown()
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    for pod in cluster.running("grows"):
        cluster.put("pods", {**pod, "status": {**pod["status"], "conditions": [disrupted]}})
        cluster.end_pod(cluster.objects["pods"]["team", pod["metadata"]["name"]])
        cluster.settle()
        cluster.step("grows", 5, trainer=0.07)
    assert cluster.cache.lost_pods(cluster.job("grows")) == ()
    cluster.exit_code = 8
    cluster.end("grows-a1", "FAILED")
    cluster.settle()
    cluster.wait(100)
    failure = cluster.status("grows").last_failure
    assert failure
    assert failure.reason == "Communication"


def test_a_node_that_is_lost_for_good_makes_the_pool_smaller() -> None:
    cluster = grown()
    pod = cluster.running("grows")[-1]
    cluster.remove("nodes", cluster.objects["nodes"]["", pod["spec"]["nodeName"]])
    cluster.end_pod(pod)
    cluster.settle()
    cluster.step("grows", 2)
    assert size(cluster) == (3, 2), "its pod waits for a node"
    cluster.wait(RESIZE_SECONDS)
    cluster.step("grows", 3)
    assert size(cluster) == (2, 2)
    assert resizes(cluster.events)[-1] == "Pool writers: 3 -> 2 nodes, because after 600 s pods run on 2."
    assert (outcomes(cluster, "grows"), len(cluster.writers("grows"))) == (["Running"], 2)


def test_nodes_that_the_trainer_does_not_use_go_back() -> None:
    cluster = running()
    cluster.step("grows", trainer=0.9)
    cluster.step("grows", 3, trainer=0.9, used=1)
    cluster.wait(RESIZE_SECONDS)
    cluster.step("grows", trainer=0.9, used=1)
    assert size(cluster) == (1, 1)
    assert resizes(cluster.events)[-1] == "Pool writers: 2 -> 1 node, because after 600 s the trainer uses 1."
    cluster.step("grows", 40, trainer=0.9)
    assert size(cluster) == (1, 1), "it does not try again at once"


def test_an_extra_pod_that_cannot_start_fails_nothing() -> None:
    cluster = running()
    cluster.step("grows", trainer=0.9)
    pod = cluster.running("grows")[-1]
    waiting = {"name": "ray-worker", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no"}}}
    ready = [{"type": "Ready", "status": "False"}]
    pod["status"] = {"phase": "Pending", "conditions": ready, "containerStatuses": [waiting]}
    cluster.put("pods", pod)
    cluster.keep_pending = True
    cluster.settle()
    cluster.wait(400)
    cluster.step("grows", 2)
    assert (cluster.status("grows").phase, size(cluster)[0]) == ("Running", 2)
    cluster.wait(RESIZE_SECONDS)
    cluster.step("grows", 2)
    assert (outcomes(cluster, "grows"), size(cluster)) == (["Running"], (1, 1))


def test_extra_nodes_are_taken_once_until_their_pods_are_gone() -> None:
    cluster = grown()
    cluster.submit("looks", job(1))
    cluster.pass_over_all()
    nodes = [f"node-{number}" for number in range(4)]

    def free() -> int:
        taken, _ = view.held_by_others(cluster.cache, cluster.job("looks"), cluster.settings)
        left = [4000 - taken.get(node, Counter())["cpu"] for node in nodes]
        assert min(left) >= 0, "no room is counted twice"
        return sum(each == 4000 for each in left)

    assert free() == 0
    cluster.do_pods_linger = True
    cluster.settle()
    assert (cluster.pool("grows").node_count, free(), begun(cluster, "looks")) == (2, 0, [False])
    cluster.bury()
    assert begun(cluster, "looks") == [True]


def test_the_next_attempt_begins_with_the_fewest_nodes() -> None:
    cluster = grown()
    assert any(each.extra for each in cluster.status("grows").reserved)
    cluster.end("grows-a1", "FAILED")
    cluster.settle()
    cluster.wait(31)
    assert outcomes(cluster, "grows") == ["Failed"]
    assert not any(each.extra for each in cluster.status("grows").reserved)
    cluster.wait(300)
    assert cluster.status("grows").attempt == 2
    assert size(cluster) == (1, 1)


def test_a_job_in_a_queue_of_kueue_keeps_its_size() -> None:
    cluster = running(4, "kueue", labels={names.QUEUE: "q"})
    cluster.step("grows", 20, trainer=0.9)
    assert size(cluster) == (1, 1)
    assert "pool writers stays at 1 node: elastic pools grow in the operator's line only" in (
        cluster.condition("grows", "Mapped").message
    )


def test_the_room_of_pods_of_the_least_size_is_no_extra() -> None:
    cluster = grown(fewest=2)
    extras = [each.node for each in cluster.status("grows").reserved if each.extra]
    assert len(extras) == 1
    cluster.submit("large", job(2))
    cluster.settle()
    assert (begun(cluster, "large"), size(cluster)) == ([False], (3, 3))


class Killed(ElasticCluster):
    """The operator is killed after one of the writes about the room of jobs, before it acts; a new one begins."""

    def __init__(self, workers: int, at: int) -> None:
        self.writes, self.at = 0, at
        super().__init__(workers)

    def write(self, key: Any, status: Any) -> None:
        before = self.job(key[1]).status
        is_new = (before.mapping, before.reserved, before.attempt) != (status.mapping, status.reserved, status.attempt)
        super().write(key, status)
        self.writes += is_new
        self.is_dead = is_new and self.writes == self.at

    def operate(self, key: Any) -> Any:
        self.is_dead = False
        plan = super().operate(key)
        if self.is_dead:
            self.start_operator()
        return plan

    def resize(self, action: Any) -> None:
        if not self.is_dead:
            super().resize(action)

    def _create(self, manifest: Any) -> None:
        if not self.is_dead:
            super()._create(manifest)


def life(at: int) -> tuple[list[tuple[int, int]], list[str], int]:
    """A pool that grows, gives a node to a job, and gets it back."""
    cluster, sizes = Killed(4, at), []
    cluster.submit("grows", elastic())
    cluster.settle()
    for share in (0.0, 0.5):
        cluster.step("grows", 12, trainer=share)
        sizes.append(size(cluster))
    cluster.submit("small", job(1))
    cluster.settle()
    cluster.step("grows", 2)
    sizes.append(size(cluster))
    cluster.end("small-a1")
    cluster.settle()
    cluster.wait(60)
    cluster.step("grows", 8, trainer=0.5)
    sizes.append(size(cluster))
    return sizes, [*outcomes(cluster, "grows"), *outcomes(cluster, "small")], cluster.writes


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_write_changes_nothing(every: int) -> None:
    """`make test` tries each fifth write, `make test-full` all."""
    sizes, ends, writes = life(0)
    assert sizes == [(1, 1), (3, 3), (2, 2), (3, 3)]
    for at in range(every, writes + 1, every):
        assert life(at)[:2] == (sizes, ends), at
