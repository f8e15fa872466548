"""Jobs wait for room in line: one begins with all of its pods or not at all, the oldest first, and none is lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_api.status import Attempt, Status
from rlhf_operator import names
from rlhf_operator.cluster import parse
from rlhf_operator.cluster.raw import Listing
from rlhf_operator.reconcile import line
from rlhf_operator.reconcile.decide import decide
from rlhf_operator.times import timestamp
from tests.each import each_case
from tests.operator.shared_cluster import NAMESPACE, SECOND, SMALL, SharedCluster, node, spec

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


def test_two_jobs_of_two_pods_run_one_after_the_other() -> None:
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


def test_twelve_jobs_with_room_for_two_finish_in_order() -> None:
    cluster = SharedCluster([node("a", 2 * (1 + HEAD))])
    made = submitted(cluster, *[spec()] * 12)
    run_all(cluster, made)
    assert cluster.begun == [f"{name}-a1" for name in made]
    assert all(outcomes(cluster, name) == ["Succeeded"] for name in made)


@pytest.mark.parametrize(
    ("count", "seed"), [(12, 0), *(pytest.param(200, seed, marks=pytest.mark.slow) for seed in range(6))]
)
def test_of_random_jobs_none_starves_or_is_overtaken(count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "BACKFILL_DEPTH", 0)  # with it jobs are overtaken by those that do not delay them
    cluster = SharedCluster([node(name, 8 + HEAD) for name in ("a", "b", "c")], seed)
    waiting = names_of(count)
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


def test_a_waiting_job_says_its_place_and_what_it_lacks() -> None:
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
        "and 2 of 2 pods of pool all (1 CPUs, 1Gi each); nobody can say when it begins."
    )
    assert told[1].message.startswith(f"2nd in line behind team/{second}; no node has room for the head pod")
    assert cluster.status(third).attempts == ()
    assert cluster.begun == [f"{first}-a1"]


def test_workers_are_placed_before_a_head_that_fits_beside_them() -> None:
    cluster = SharedCluster([node("a", HEAD), node("b", 2)])
    submitted(cluster, spec(cpus=2))
    cluster.pass_over_all()
    assert reserved(cluster) == {"a": 1050, "b": 2000}, "although the head has more memory"


def test_a_job_waits_no_longer_than_it_wants_to() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD)])
    _, second = submitted(cluster, spec(), spec(runPolicy={"queueDeadlineSeconds": 600}))
    cluster.settle()
    cluster.wait(599)
    assert cluster.status(second).phase == "Queued"
    cluster.wait(2)
    assert cluster.status(second).phase == "Failed"
    assert cluster.condition(second, "Failed").reason == "QueueDeadlineExceeded"


def test_a_small_job_overtakes_a_large_one_on_other_nodes() -> None:
    cluster = SharedCluster([node("a", 4 + HEAD, kind="a"), node("b", 1 + HEAD, kind="b")])
    on_a, on_b = {"kind": "a"}, {"kind": "b"}
    small, large, behind, beside = submitted(cluster, spec(on=on_a), spec(4, on=on_a), spec(on=on_a), spec(on=on_b))
    cluster.settle()
    assert [cluster.status(name).phase for name in (small, large, behind, beside)] == [
        *("Provisioning", "Queued", "Queued", "Provisioning")
    ]
    assert cluster.condition(behind, "QuotaReserved").message == (
        f"2nd in line behind team/{large}; the free room is kept for that job; "
        "expected to begin by 2026-01-31 12:15 UTC."
    )
    cluster.put("nodes", node("c", 0.5, kind="c"))
    seen = cluster.observe((NAMESPACE, behind))
    assert seen
    assert not decide(seen, cluster.now, cluster.settings).actions, "who waits reads nothing live"


def test_priority_goes_first_and_then_age() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD)])
    for name, value, is_default in (("low", -1, False), ("usual", 10, True), ("high", 1000, False)):
        metadata = {"name": name, "uid": name}
        cluster.put("priorities", {"metadata": metadata, "value": value, "globalDefault": is_default})
    classes = ["low", "usual", None, "low", "high", "usual", "high"]
    wanted = [spec() for _ in classes]
    for each, priority in zip(wanted, classes, strict=True):
        each["runtime"]["worker"]["template"]["spec"]["priorityClassName"] = priority
    cluster.submit("runs", spec())
    cluster.settle()
    made = submitted(cluster, *wanted)
    cluster.settle()
    assert cluster.begun == ["runs-a1"], "nobody is pushed out"
    run_all(cluster, ["runs", *made])
    assert cluster.begun == ["runs-a1", *(f"{made[place]}-a1" for place in (4, 6, 1, 2, 5, 0, 3))]


def test_a_job_too_large_for_the_nodes_is_in_nobodys_way() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD)])
    large, small = submitted(cluster, spec(2), spec())
    cluster.settle()
    assert (cluster.status(large).phase, cluster.status(small).phase) == ("Mapping", "Provisioning")
    told = cluster.condition(large, "Mapped")
    assert told.reason == "NoFeasiblePlacement"
    assert "even if all RLHFJobs that run had ended" in told.message
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


def test_who_finds_the_room_taken_loses_no_attempt() -> None:
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
    cluster = SharedCluster([node("a", 1 + HEAD)], 0, "kueue")
    cluster.submit("first", spec())
    cluster.settle()
    cluster.submit("queued", spec(), **{names.QUEUE: "team"})
    cluster.settle()
    assert cluster.begun == ["first-a1", "queued-a1"]
    assert cluster.status("queued").reserved == ()


def test_a_queues_label_overtakes_nobody_without_kueue() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD), node("b", 1 + HEAD)])
    for name in ("first", "second"):
        cluster.submit(name, spec(2), **{names.QUEUE: "team"})
    cluster.settle()
    assert (cluster.status("first").phase, cluster.status("second").phase) == ("Provisioning", "Queued")
    assert cluster.condition("second", "QuotaReserved").reason == "WaitingForRoom"
    assert cluster.begun == ["first-a1"]


def test_room_is_held_from_the_status_on_not_the_first_pod() -> None:
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


BESIDE = {"name": "mine", "image": "x"}
"""A container of a user's template."""


@each_case(
    ("of_pods", "has"),
    [
        ({"containers": [{**BESIDE, "resources": {"limits": {"rdma/hca": 4}}}]}, {"rdma/hca": "4"}),
        (
            {"containers": [{**BESIDE, "resources": {"limits": {"ephemeral-storage": "200Gi"}}}]},
            {"ephemeral-storage": "300Gi"},
        ),
        ({"initContainers": [{**BESIDE, "resources": {"requests": {"cpu": "5"}}}]}, {"cpu": str(9 + 2 * HEAD)}),
        ({"overhead": {"cpu": "4"}}, {"cpu": str(9 + 2 * HEAD)}),
    ],
    ids=["a limit", "storage", "a container before the others", "overhead"],
)
def test_what_the_scheduler_counts_is_counted(of_pods: dict[str, Any], has: dict[str, str]) -> None:
    cluster, wanted = SharedCluster([node("a", 99, has)]), spec()
    wanted["runtime"]["worker"]["template"]["spec"] |= of_pods
    first, second = submitted(cluster, wanted, wanted)
    cluster.settle()
    assert (cluster.status(first).phase, cluster.status(second).phase) == ("Provisioning", "Queued")
    assert not [pod for pod in cluster.objects["pods"].values() if not pod["spec"].get("nodeName")]
    cluster.end_one()
    cluster.settle()
    assert cluster.begun == [f"{first}-a1", f"{second}-a1"]


def test_pods_of_a_failed_job_hold_up_no_job_with_room() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD), node("b", 1 + HEAD)])
    failing, large, small = submitted(
        cluster, spec(runPolicy={"backoffLimit": 0, "keepPodsOnFailure": True}), spec(2), spec()
    )
    cluster.settle()
    assert [cluster.status(name).phase for name in (large, small)] == ["Queued", "Queued"]
    cluster.end(f"{failing}-a1", "FAILED")
    cluster.settle()
    cluster.wait(61)
    assert cluster.pods_of(f"{failing}-a1")
    assert cluster.condition(large, "Mapped").reason == "NoFeasiblePlacement"
    assert cluster.begun == [f"{failing}-a1", f"{small}-a1"]


def test_the_first_is_not_overtaken_at_its_heads_node() -> None:
    cluster = SharedCluster([node("a", 1, kind="a"), node("b", 1, kind="b"), node("heads", HEAD, kind="heads")])
    wanted = [spec(on={"kind": kind}) for kind in ("b", "a", "b")]
    for each in wanted:
        each["runtime"]["controller"] = {**SMALL, "template": {"spec": {"nodeSelector": {"kind": "heads"}}}}
    runs, first, passing = submitted(cluster, *wanted)
    cluster.settle()
    assert [cluster.status(name).phase for name in (first, passing)] == ["Queued", "Queued"]
    cluster.end(f"{runs}-a1")
    for name in (runs, passing):
        cluster.operate((NAMESPACE, name))
    cluster.settle()
    assert cluster.begun == [f"{runs}-a1", f"{first}-a1"]


def test_who_holds_room_takes_no_more_of_it_before_its_elders() -> None:
    cluster, on = SharedCluster([node("a", 1 + HEAD)]), {"kind": "large"}
    growing = {"device": "CPU", "nodes": 1, "maxNodes": 3, "slotsPerNode": 1}
    elder, younger = submitted(
        cluster, spec(2, on=on, suspend=True), spec(resources=growing, runPolicy={"restartBackoffSeconds": 0})
    )
    cluster.settle()
    for name in ("b", "c"):
        cluster.put("nodes", node(name, 1 + HEAD, kind="large"))
    cluster.submit("holds", spec(2, on=on))
    cluster.settle()
    document = cluster.objects["jobs"][NAMESPACE, elder]
    cluster.put("jobs", {**document, "spec": {**document["spec"], "suspend": False}})
    cluster.settle()
    assert cluster.status(elder).phase == "Queued"
    cluster.end(f"{younger}-a1", "FAILED")
    cluster.operate((NAMESPACE, younger))
    failed = cluster.status(younger)
    assert failed.mapping
    by_an_older_release = failed.mapping.model_copy(update={"input_hash": "0" * 32})
    cluster.write((NAMESPACE, younger), failed.model_copy(update={"mapping": by_an_older_release}))
    cluster.end("holds-a1")
    for name in ("holds", younger):
        cluster.operate((NAMESPACE, name))
    cluster.settle()
    assert cluster.begun == [f"{younger}-a1", "holds-a1", f"{younger}-a2", f"{elder}-a1"]
    again = cluster.status(younger).mapping
    assert again
    assert [pool.nodes for pool in again.pools] == [pool.nodes for pool in failed.mapping.pools]


def test_an_attempt_reserves_once_its_pods_have_nodes() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD)])
    (job,) = submitted(cluster, spec())
    cluster.pass_over_all()
    cluster.write((NAMESPACE, job), cluster.status(job).model_copy(update={"reserved": ()}))
    cluster.settle()
    assert reserved(cluster) == {"a": 2050}


def test_withdrawn_attempts_hide_no_failure_and_put_none_off() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD)])
    (job,) = submitted(cluster, spec(runPolicy={"restartBackoffSeconds": 10}))
    now = timestamp(cluster.now)
    failed = Attempt(attempt=1, start_time=now, end_time=now, slots=1, outcome="Failed", counted=True, reason="Hang")
    withdrawn = [
        Attempt(attempt=number, start_time=now, end_time=now, slots=1, outcome="Withdrawn") for number in range(2, 10)
    ]
    before = Status(attempt=9, failed_attempts=1, attempts=(failed, *withdrawn))
    cluster.write((NAMESPACE, job), before)
    cluster.settle()
    cluster.end(f"{job}-a10", "FAILED")
    cluster.settle()
    cluster.wait(2 * 10 * 1.2)
    assert cluster.begun == [f"{job}-a10", f"{job}-a11"]
    assert [each.attempt for each in cluster.status(job).attempts] == [1, *range(3, 12)]


def test_a_deleted_job_gives_its_room_to_the_next_at_once() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD)])
    first, second = submitted(cluster, spec(), spec())
    cluster.pass_over_all()
    document = cluster.objects["jobs"][NAMESPACE, first]
    cluster.put("jobs", {**document, "metadata": {**document["metadata"], "deletionTimestamp": timestamp(cluster.now)}})
    cluster.pass_over_all()
    assert cluster.begun == [f"{first}-a1", f"{second}-a1"]


def test_a_reservation_counts_where_its_pods_can_go() -> None:
    cordoned = {**node("b", 1 + HEAD), "spec": {"unschedulable": True}}
    cluster = SharedCluster([cordoned, node("a", 1 + HEAD), node("c", 2.1 + HEAD)])
    submitted(cluster, spec())
    cluster.pass_over_all()
    assert list(reserved(cluster)) == ["c"]
    cluster.occupy("stranger", "c", 2.1 + HEAD)
    cluster.submit("second", spec())
    cluster.pass_over_all()
    assert cluster.status("second").phase == "Queued"


@pytest.mark.parametrize("is_new", [True, False])
def test_a_job_whose_passes_fail_is_not_waited_for(is_new: bool) -> None:
    cluster = SharedCluster([node("a", 1 + HEAD)])
    first, second = submitted(cluster, spec(), spec())
    if not is_new:
        cluster.occupy("stranger", "a", 1)
        cluster.settle()
        cluster.remove("pods", cluster.objects["pods"][NAMESPACE, "stranger"])
    cluster.observer.failing[NAMESPACE, first] = time.monotonic() - 61
    cluster.put("jobs", cluster.objects["jobs"][NAMESPACE, first])
    cluster.operate((NAMESPACE, second))
    assert cluster.begun == [f"{second}-a1"]


@pytest.mark.parametrize("wrong", [{"priorityClassName": 5}, {"nodeSelector": "x"}, {"containers": [{}]}])
def test_a_job_that_cannot_be_read_holds_up_none_behind_it(wrong: dict[str, Any]) -> None:
    cluster, unreadable = SharedCluster([node("a", 1 + HEAD)]), spec()
    unreadable["runtime"]["worker"]["template"]["spec"] = wrong
    first, second = submitted(cluster, unreadable, spec())
    cluster.operate((NAMESPACE, second))
    cluster.settle()
    assert cluster.condition(first, "Accepted").reason == "InvalidSpec"
    assert cluster.begun == [f"{second}-a1"]


def test_a_long_line_is_not_rewritten_for_each_job() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD)])
    made = submitted(cluster, *[spec()] * 40)
    cluster.settle()
    cluster.wait(61)
    assert cluster.condition(made[10], "QuotaReserved").message.startswith(f"10th in line behind team/{made[1]}; ")
    assert cluster.condition(made[11], "QuotaReserved").message == "At least 10 jobs are before it in line."
    before, cluster.passes = {name: cluster.job(name).resource_version for name in made}, 0
    cluster.end_one()
    cluster.settle()
    assert cluster.begun == [f"{made[0]}-a1", f"{made[1]}-a1"]
    assert cluster.passes < 30, "only who may begin is looked at"
    cluster.wait(61)
    changed = [name for name in made if cluster.job(name).resource_version != before[name]]
    assert changed == made[:11]


def test_many_jobs_at_once_take_few_passes() -> None:
    cluster = SharedCluster([node(f"node-{number}", 1 + HEAD) for number in range(5)])
    for name in (made := names_of(30)):
        cluster.submit(name, spec())
    cluster.settle()
    assert cluster.passes <= 5 * len(made), "no job is looked at for each first look at another"


def test_the_lists_that_mend_a_cut_watch_wake_the_next_in_line() -> None:
    cluster = SharedCluster([node("a", 1 + HEAD)])
    first, second = submitted(cluster, spec(), spec())
    cluster.settle()
    cluster.timers.clear()
    del cluster.objects["jobs"][NAMESPACE, first]
    cluster.objects["rayjobs"], cluster.objects["pods"] = {}, {}
    for kind, there in cluster.objects.items():
        listing = Listing(items=tuple(there.values()), version=cluster.version)
        cluster.queue |= cluster.cache.put_list(kind, listing, cluster.cache.keys(kind, None))
    cluster.settle()
    assert cluster.begun == [f"{first}-a1", f"{second}-a1"]
