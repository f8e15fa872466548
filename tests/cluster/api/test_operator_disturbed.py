"""The operator when the way to the API server is bad, or the server, KubeRay or another operator are away or stuck."""

import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.client import Cluster
from tests.cluster.lifecycle import SECONDS
from tests.cluster.operator_process import OperatorProcess, operator
from tests.cluster.proxy import CUT, Fault, proxy
from tests.cluster.stage import ROOM_FOR_ALL, Lives, has_failed_once, played, small_job
from tests.cluster.wrong_clock import WrongClock

NAMES = ("one", "two", "three")
SEED = 7
WRITES = ("POST", "PUT", "PATCH", "DELETE")
ANEW = "the operator begins anew"
"""In the log of one that has lost its Lease, and lives on."""


@pytest.fixture
def lives(rlhf_server: Cluster, namespace: str) -> Iterator[Lives]:
    with played(rlhf_server, namespace) as made:
        yield made


def bad_luck(seed: int) -> Callable[[str, str], Fault | None]:
    """A third of all requests but those for the Lease go wrong, each in some way."""
    dice = random.Random(seed)
    reads = [Fault(429, retry_after=1), Fault(500), Fault(503), Fault(CUT)]
    writes = [*reads, Fault(409), Fault(CUT, lost=True), Fault(CUT, lost=True)]

    def plan(method: str, path: str) -> Fault | None:
        if "/leases" in path or dice.random() > 1 / 3:
            return None
        return dice.choice(writes if method in WRITES else reads)

    return plan


def test_faults_and_cut_watches_cost_time_but_no_job(
    rlhf_server: Cluster, namespace: str, lives: Lives, tmp_path: Path
) -> None:
    with (
        proxy(rlhf_server) as way,
        operator(rlhf_server, namespace, tmp_path, way.kubeconfig(tmp_path), **ROOM_FOR_ALL) as process,
    ):
        way.plan, way.requests_a_cut = bad_luck(SEED), 5
        lives.apply(*(small_job(name, namespace) for name in NAMES))
        with ThreadPoolExecutor(len(NAMES)) as threads:
            finals = list(threads.map(lives.through_a_failure, NAMES))
        assert all(map(has_failed_once, finals)), finals
        assert [lives.jobs.status(name) for name in NAMES] == finals
        assert {fault.code for fault in way.played} == {CUT, 409, 429, 500, 503}
        assert way.played[Fault(CUT, lost=True)]
        assert "Traceback" not in process.log()


def test_a_job_goes_on_while_servers_come_and_go(
    rlhf_server: Cluster, namespace: str, lives: Lives, tmp_path: Path
) -> None:
    with operator(rlhf_server, namespace, tmp_path, **ROOM_FOR_ALL) as process:
        with rlhf_server.without_kuberay():
            lives.apply(small_job("one", namespace), small_job("deleted", namespace))
            rlhf_server.until(lambda: lives.jobs.rayjobs("one"), SECONDS, "its RayJob is made")
            rlhf_server.until(lambda: lives.jobs.rayjobs("deleted"), SECONDS, "its RayJob is made")
            lives.jobs.delete("deleted")
            rlhf_server.until(lambda: not lives.jobs.rayjobs("deleted"), SECONDS, "no RayJob is left")
        lives.train("one")
        rlhf_server.restart()
        with rlhf_server.without_kuberay():
            lives.fail("one")  # KubeRay, were it there, might write its own view of the RayJob over this
            lives.jobs.wait_for("one", "Restarting", "Provisioning")
        lives.train("one", 2)
        rlhf_server.restart()
        final = lives.succeed("one", 2)
        assert has_failed_once(final)
        assert lives.jobs.status("one") == final
        assert "Traceback" not in process.log()


def test_the_operator_outlives_the_api_server_and_etcd(
    rlhf_server: Cluster, namespace: str, lives: Lives, tmp_path: Path
) -> None:
    with (
        operator(rlhf_server, namespace, tmp_path, **ROOM_FOR_ALL) as first,
        operator(rlhf_server, namespace, tmp_path, **ROOM_FOR_ALL) as second,
    ):
        lives.apply(small_job("one", namespace))
        lives.train("one")

        def is_lost(times: int) -> bool:
            return (first.log() + second.log()).count(ANEW) >= times

        for times, program in enumerate(("kube-apiserver", "etcd"), 1):
            with rlhf_server.without(program):
                rlhf_server.until(partial(is_lost, times), SECONDS, "the Lease is lost")
            lives.jobs.train("one", lives.kubelets.trainer("one"), 3 + times)
        final = lives.succeed("one")
        assert (final["attempt"], final["failedAttempts"]) == (1, 0)
        assert first.running
        assert second.running
        assert "Traceback" not in first.log() + second.log()


def test_a_clock_that_goes_wrong_decides_nothing(
    rlhf_server: Cluster, namespace: str, lives: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = WrongClock(tmp_path)
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    with operator(rlhf_server, namespace, tmp_path, **ROOM_FOR_ALL) as process:
        lives.apply(small_job("slow", namespace, startupDeadlineSeconds=300))
        lives.jobs.wait_for("slow", "Initializing")
        clock.set(600)
        passes = process.metric("rlhf_operator_reconcile_total")
        lives.jobs.patch("slow", {"metadata": {"labels": {"looked": "at"}}})
        rlhf_server.until(lambda: process.metric("rlhf_operator_reconcile_total") > passes, SECONDS, "it looks")
        clock.set(-600)
        lives.apply(small_job("slower", namespace, startupDeadlineSeconds=3, backoffLimit=0))
        failed = lives.jobs.wait_for("slower", "Failed")
        assert failed["lastFailure"]["reason"] == "StartupTimeout"
        assert lives.jobs.phase("slow") == "Initializing"
        assert [each["outcome"] for each in lives.jobs.status("slow")["attempts"]] == ["Running"]


def test_the_next_operator_takes_over_from_a_stuck_one(
    rlhf_server: Cluster, namespace: str, lives: Lives, tmp_path: Path
) -> None:
    def leader() -> str:
        leases = rlhf_server.items(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases")
        return "".join(each["spec"].get("holderIdentity", "") for each in leases)

    def leads(process: OperatorProcess) -> bool:
        return leader() == f"operator-{process.port}"

    def tells_alone(process: OperatorProcess, other: OperatorProcess) -> bool:
        """Whether of two replicas one has the series of jobs, so that a sum counts each job once."""
        shown = [each.metric("rlhf_job_info") for each in (process, other)]
        return shown == [1, 0] and other.metric("rlhf_operator_leader") == 0

    with operator(rlhf_server, namespace, tmp_path, **ROOM_FOR_ALL) as first:
        rlhf_server.until(lambda: leads(first), SECONDS, "the first leads")
        with operator(rlhf_server, namespace, tmp_path, **ROOM_FOR_ALL) as second:
            lives.apply(small_job("one", namespace))
            lives.train("one")
            assert tells_alone(first, second)
            first.send(signal.SIGSTOP)
            lives.fail("one")
            rlhf_server.until(lambda: leads(second), SECONDS, "the second leads")
            lives.train("one", 2)
            first.send(signal.SIGCONT)
            rlhf_server.until(lambda: ANEW in first.log(), SECONDS, "the first has noticed that it leads no more")
            first.wait_until_ready()
            assert tells_alone(second, first)
            second.kill()
            rlhf_server.until(lambda: leads(first), SECONDS, "the first leads again")
            rlhf_server.until(lambda: tells_alone(first, second), SECONDS, "its series are there again")
            final = lives.succeed("one", 2)
            assert has_failed_once(final)
            assert lives.jobs.status("one") == final
