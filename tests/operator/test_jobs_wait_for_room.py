"""Jobs wait for room in line: one begins with all of its pods or not at all, the oldest first, and none is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_operator import names
from rlhf_operator.cluster import parse
from tests.operator.shared_cluster import NAMESPACE, SECOND, SharedCluster, node, spec

HEAD = 1.05
"""CPUs of a head pod with its side-car."""
PATIENT = {"startupDeadlineSeconds": 10**6}
"""Of a job whose trainer never says a word."""


def names_of(count: int) -> list[str]:
    return [f"job-{number:03}" for number in range(count)]


def submitted(cluster: SharedCluster, *specs: dict[str, Any]) -> list[str]:
    """Jobs that are made one after the other within a second."""
    made = names_of(len(specs))
    for name, each in zip(made, specs, strict=True):
        cluster.submit(name, each)
    return made


def run_all(cluster: SharedCluster, made: list[str], happenings: list[Callable[[], object]] = []) -> None:  # noqa: B006
    """Everything happens in a random order, until all jobs have ended."""
    todo = [cluster.make_pods, *[cluster.schedule] * 3, *[cluster.end_one] * 2, *happenings]
    for _ in range(100 * len(made)):
        if all(cluster.status(name).phase in ("Succeeded", "Failed") for name in made):
            return
        for _ in range(cluster.random.randrange(4)):
            if cluster.queue:
                cluster.operate(cluster.random.choice(sorted(cluster.queue)))
        if not cluster.random.choice(todo)():
            cluster.pass_over_all()
            if not any(each() for each in todo[:6]):
                cluster.wait(61)
        everything = sum(capacity(cluster, name) for _, name in cluster.objects["nodes"])
        assert sum(reserved(cluster).values()) <= everything, "room is given to one job only"
    raise AssertionError({name: cluster.status(name).phase for name in made})


def reserved(cluster: SharedCluster) -> dict[str, int]:
    """Thousandths of CPUs that jobs hold on each node."""
    held: dict[str, int] = {}
    for _, name in cluster.objects["jobs"]:
        for each in cluster.status(name).reserved:
            held[each.node] = held.get(each.node, 0) + each.amounts["cpu"]
    return held


def capacity(cluster: SharedCluster, name: str) -> float:
    return 1000 * float(cluster.objects["nodes"]["", name]["status"]["allocatable"]["cpu"])


def outcomes(cluster: SharedCluster, name: str) -> list[str]:
    return [each.outcome for each in cluster.status(name).attempts]


def test_two_jobs_of_two_pods_with_room_for_two_run_one_after_the_other() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD), node("b", 1 + HEAD)])
    first, second = submitted(cluster, spec(2), spec(2))
    cluster.settle()
    assert (cluster.status(first).phase, cluster.status(second).phase) == ("Provisioning", "Queued")
    assert not [pod for pod in cluster.objects["pods"].values() if not pod["spec"].get("nodeName")]
    cluster.end_one()
    cluster.settle()
    assert cluster.begun == [f"{first}-a1", f"{second}-a1"]
    cluster.end_one()
    cluster.settle()
    assert [outcomes(cluster, name) for name in (first, second)] == [["Succeeded"]] * 2


def test_twelve_jobs_with_room_for_two_finish_in_order_and_none_loses_an_attempt() -> None:
    cluster = SharedCluster([node("a", 2 * (1 + HEAD))])
    made = submitted(cluster, *[spec()] * 12)
    run_all(cluster, made)
    assert cluster.begun == [f"{name}-a1" for name in made]
    assert all(outcomes(cluster, name) == ["Succeeded"] for name in made)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_of_200_random_jobs_none_waits_for_ever_and_none_is_overtaken(seed: int) -> None:
    cluster = SharedCluster([node(name, 8 + HEAD) for name in ("a", "b", "c")], seed)
    waiting = names_of(200)
    made = list(waiting)

    def another_job_comes() -> bool:
        if not waiting:
            return False
        cluster.now += SECOND * cluster.random.randrange(3)
        workers, cpus = cluster.random.choice([1, 2, 4]), cluster.random.randrange(1, 5)
        cluster.submit(waiting.pop(0), spec(workers, cpus))
        return True

    def the_operator_is_killed() -> bool:
        if cluster.random.random() < 0.1:
            cluster.start_operator()
        return True

    another_job_comes()
    while waiting:
        there = made[: len(made) - len(waiting)]
        run_all(cluster, there, [another_job_comes, the_operator_is_killed])
        another_job_comes()
    run_all(cluster, made, [the_operator_is_killed])
    assert [name for name in cluster.begun if name.endswith("-a1")] == [f"{name}-a1" for name in made]
    ends = Counter(outcome for name in made for outcome in outcomes(cluster, name))
    assert ends["Succeeded"] == len(made) >= ends.total() - ends["Withdrawn"]
    assert ends["Withdrawn"] <= len(made) / 10, "a scheduler that spreads pods at random seldom leaves room in pieces"


def test_a_waiting_job_says_its_place_and_what_it_lacks_and_has_no_deadline() -> None:
    cluster = SharedCluster([node("a", 2 + HEAD)])
    first, second, third = submitted(
        cluster, spec(2, runPolicy=PATIENT), spec(2), spec(runPolicy={"startupDeadlineSeconds": 5})
    )
    cluster.settle()
    cluster.wait(10_000)
    told = [cluster.condition(name, "QuotaReserved") for name in (second, third)]
    assert [(each.status, each.reason) for each in told] == [("False", "WaitingForRoom")] * 2
    assert told[0].message == (
        "1st in line; no node has room for the head pod (1.05 CPUs, 1.06Gi) "
        "and 2 of 2 pods of pool all (1 CPUs, 1Gi each)."
    )
    assert told[1].message.startswith("2nd in line; no node has room for the head pod")
    assert cluster.status(third).attempts == ()
    assert cluster.begun == [f"{first}-a1"]


def test_a_job_waits_no_longer_than_it_wants_to() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD)])
    _, second = submitted(cluster, spec(), spec(runPolicy={"queueDeadlineSeconds": 600}))
    cluster.settle()
    cluster.wait(599)
    assert cluster.status(second).phase == "Queued"
    cluster.wait(2)
    assert cluster.status(second).phase == "Failed"
    assert cluster.condition(second, "Failed").reason == "QueueDeadlineExceeded"


def test_a_small_job_does_not_overtake_a_large_one_on_the_same_nodes_but_on_others() -> None:
    cluster = SharedCluster([node("a", 4 + HEAD, kind="a"), node("b", 1 + HEAD, kind="b")])
    on_a, on_b = {"kind": "a"}, {"kind": "b"}
    small, large, behind, beside = submitted(cluster, spec(on=on_a), spec(4, on=on_a), spec(on=on_a), spec(on=on_b))
    cluster.settle()
    assert [cluster.status(name).phase for name in (small, large, behind, beside)] == [
        *("Provisioning", "Queued", "Queued", "Provisioning")
    ]
    assert cluster.condition(behind, "QuotaReserved").message == "2nd in line."


def test_a_job_for_which_the_nodes_are_too_small_is_in_nobodys_way() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD)])
    large, small = submitted(cluster, spec(2), spec())
    cluster.settle()
    assert (cluster.status(large).phase, cluster.status(small).phase) == ("Mapping", "Provisioning")
    told = cluster.condition(large, "Mapped")
    assert told.reason == "NoFeasiblePlacement"
    assert "even if all RLHFJobs had ended" in told.message
    cluster.put("nodes", node("b", 2 + HEAD))
    cluster.settle()
    assert cluster.status(large).phase == "Provisioning"


def test_what_a_template_requests_may_be_a_number() -> None:
    cluster = SharedCluster([node("a", 2 + HEAD)])
    wanted = spec()
    beside = {"name": "mine", "image": "x", "resources": {"requests": {"cpu": 0.5, "rdma/hca": 4}}}
    wanted["runtime"]["worker"]["template"]["spec"]["containers"] = [beside]
    (job,) = submitted(cluster, wanted)
    cluster.settle()
    assert "(1.5 CPUs, 1Gi, 4 rdma/hca)" in cluster.condition(job, "Mapped").message


def test_who_finds_the_room_taken_after_all_gives_back_what_it_has_and_loses_no_attempt() -> None:
    cluster = SharedCluster([node("a", 1, to="workers"), node("b", HEAD), node("c", 1, to="workers")])
    first, second = submitted(cluster, spec(2, on={"to": "workers"}), spec(1, on={"to": "workers"}))
    cluster.pass_over_all()
    cluster.occupy("stranger", "c", 1)
    cluster.settle()
    assert cluster.status(first).phase == "Provisioning"
    cluster.wait(121)
    assert cluster.status(first).phase in ("Queued", "Mapping")
    assert outcomes(cluster, first) == ["Withdrawn"]
    assert cluster.status(first).failed_attempts == 0
    assert cluster.begun == [f"{first}-a1", f"{second}-a1"], "others may begin meanwhile"
    cluster.remove("pods", cluster.objects["pods"][NAMESPACE, "stranger"])
    cluster.end(f"{second}-a1")
    cluster.settle()
    cluster.wait(400)
    assert cluster.begun[2:] == [f"{first}-a2"]
    cluster.end_one()
    cluster.settle()
    assert outcomes(cluster, first) == ["Withdrawn", "Succeeded"]


def test_an_attempt_that_failed_keeps_its_room_for_the_next_one() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD)])
    first, second = submitted(cluster, spec(), spec())
    cluster.settle()
    cluster.end(f"{first}-a1", "FAILED")
    cluster.settle()
    assert (cluster.status(first).phase, cluster.status(second).phase) == ("Restarting", "Queued")
    cluster.wait(60)
    assert cluster.begun == [f"{first}-a1", f"{first}-a2"]


@pytest.mark.parametrize("change", [{"suspend": True}, {"training": {}}], ids=["suspended", "an invalid spec"])
def test_a_job_that_cannot_go_on_keeps_no_room(change: dict[str, Any]) -> None:
    cluster = SharedCluster([node("a", 1 + HEAD)])
    first, second = submitted(cluster, spec(), spec())
    cluster.settle()
    cluster.end(f"{first}-a1", "FAILED")
    document = cluster.objects["jobs"][NAMESPACE, first]
    metadata = {**document["metadata"], "generation": 2}
    cluster.put("jobs", {**document, "metadata": metadata, "spec": {**document["spec"], **change}})
    cluster.settle()
    assert cluster.status(first).reserved == ()
    assert cluster.begun == [f"{first}-a1", f"{second}-a1"]


def test_a_job_in_a_queue_of_kueue_waits_in_no_line() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD)])
    cluster.submit("first", spec())
    cluster.settle()
    cluster.submit("queued", spec(), **{names.QUEUE: "team"})
    cluster.settle()
    assert cluster.begun == ["first-a1", "queued-a1"]
    assert cluster.status("queued").reserved == ()


def test_room_is_held_from_the_status_on_and_not_from_the_first_pod_on() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD), node("b", 1 + HEAD)])
    submitted(cluster, *[spec()] * 3)
    cluster.pass_over_all()
    assert not cluster.objects["pods"]
    assert cluster.begun == ["job-000-a1", "job-001-a1"]
    assert reserved(cluster) == {"a": 2050, "b": 2050}
    cluster.start_operator()
    cluster.settle()
    assert cluster.begun == ["job-000-a1", "job-001-a1"]
    bound = [parse.pod(each).node for each in cluster.objects["pods"].values()]
    assert sorted(bound) == ["a", "a", "b", "b"]
