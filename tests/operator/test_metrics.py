"""The operator's port: a real server, scraped as Prometheus does, against docs/operator-metrics.md."""

import asyncio
import socket
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
from aiohttp import ClientSession
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from rlhf_api.status import Phase, Status
from rlhf_operator.metrics import JOB_METRICS, OPERATOR_METRICS, Account, OperatorMetrics, look, samples_of
from rlhf_operator.server import Ports, Server
from rlhf_operator.snapshot import ObservedJob
from tests.each import each_case
from tests.repo.tree import ROOT

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
WHOLE: dict[str, Any] = {
    "phase": "Running",
    "attempt": 2,
    "failedAttempts": 1,
    "queue": "research",
    "progress": {"step": 7, "totalSteps": 100, "stage": "PPO", "stepSeconds": 12.5},
    "checkpoint": {"step": 5, "uri": "pvc://c/x", "time": "2026-03-01T11:58:00Z"},
    "lastFailure": {"reason": "NodeLost", "message": "The node is gone."},
    "mapping": {
        "inputHash": "x",
        "device": "GPU",
        "slots": 16,
        "gpus": 16,
        "pools": [{"name": "all", "models": ["actor"], "nodes": 2, "slotsPerNode": 8}],
        "sizes": [],
        "predictedStepSeconds": 11.0,
        "pricePerHour": 36.0,
    },
}
RECONCILE = "rlhf_operator_reconcile_duration_seconds"
QUEUED: dict[str, Any] = {
    "phase": "Queued",
    "conditions": [
        {
            "type": "QuotaReserved",
            "status": "False",
            "reason": "Pending",
            "lastTransitionTime": "2026-03-01T11:59:30+00:00",
            "observedGeneration": 1,
        }
    ],
}


def job(name: str, status: Mapping[str, Any] | None = None, spec: Mapping[str, Any] | None = None) -> ObservedJob:
    return ObservedJob(
        namespace="team",
        name=name,
        uid=f"uid-{name}",
        generation=1,
        resource_version="1",
        created=NOW,
        deleting=False,
        labels={},
        spec={"algorithm": {"name": "PPO"}} if spec is None else spec,
        status=Status.model_validate(status or {}, by_alias=True, by_name=False),
    )


def metrics_of(
    jobs: Iterable[ObservedJob] = (),
    *,
    leads: bool = True,
    depth: int = 0,
    failed: Mapping[tuple[str, str], int] | None = None,
) -> OperatorMetrics:
    return OperatorMetrics(
        version="1.2.3",
        jobs=lambda: jobs,
        queue_depth=lambda: depth,
        failed_passes=lambda: failed or {},
        leads=lambda: leads,
        now=lambda: NOW,
    )


def free_ports() -> Ports:
    """Ports that nobody uses."""
    with socket.socket() as one, socket.socket() as other:
        for free in (one, other):
            free.bind(("", 0))
        return Ports(metrics=one.getsockname()[1], probes=other.getsockname()[1])


async def fetched(port: int, path: str) -> tuple[int, str]:
    async with ClientSession() as session, session.get(f"http://localhost:{port}{path}") as answer:
        return answer.status, await answer.text()


def scraped(metrics: OperatorMetrics) -> dict[str, Metric]:
    """What /metrics answers over HTTP: name of each family (a counter's ends in _total) -> family."""

    async def scrape() -> str:
        server = Server(metrics.registry, unhealthy=lambda: None, unready=lambda: None)
        ports = free_ports()
        await server.start(ports)
        try:
            status, text = await fetched(ports.metrics, "/metrics")
        finally:
            await server.stop()
        assert status == 200
        return text

    families = text_string_to_metric_families(asyncio.run(scrape()))
    return {f"{family.name}_total" if family.type == "counter" else family.name: family for family in families}


def values(family: Metric) -> dict[tuple[str, ...], float]:
    """(values of the labels in the order of their names) -> value, without the times at which counters began."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_the_port_serves_what_the_engine_reported() -> None:
    metrics = metrics_of(leads=False, depth=3)
    metrics.reconciled("done", 0.02)
    metrics.reconciled("done", 0.2)
    metrics.reconciled("stale", 0.02)
    metrics.requested("patch", "rlhfjobs/status", 200)
    metrics.requested("patch", "rlhfjobs/status", 409)
    metrics.requested("patch", "rlhfjobs/status", 200)
    families = scraped(metrics)
    assert values(families["rlhf_operator_reconcile_total"]) == {("done",): 2, ("stale",): 1}
    assert values(families["rlhf_operator_api_requests_total"]) == {
        ("200", "rlhfjobs/status", "patch"): 2,
        ("409", "rlhfjobs/status", "patch"): 1,
    }
    assert values(families["rlhf_operator_queue_depth"]) == {(): 3}
    assert values(families["rlhf_operator_leader"]) == {(): 0}
    assert values(families["rlhf_operator_build_info"]) == {("1.2.3",): 1}
    duration = {(s.name, s.labels.get("le")): s.value for s in families[RECONCILE].samples}
    assert duration[f"{RECONCILE}_count", None] == 3
    assert duration[f"{RECONCILE}_sum", None] == pytest.approx(0.24)
    assert duration[f"{RECONCILE}_bucket", "0.1"] == 2
    assert values(families["process_resident_memory_bytes"])[()] > 1e6


def test_a_job_shows_how_many_passes_over_it_have_failed() -> None:
    families = scraped(metrics_of([job("one"), job("two")], failed={("team", "two"): 11, ("team", "gone"): 3}))
    assert values(families["rlhf_job_failed_passes"]) == {("one", "team"): 0, ("two", "team"): 11}


def test_a_running_job_shows_its_status() -> None:
    families = scraped(metrics_of([job("full", WHOLE)]))
    key = ("full", "team")
    assert values(families["rlhf_job_info"]) == {("PPO", "full", "team", "research", "uid-full"): 1}
    assert {
        name: values(families[f"rlhf_job_{name}"])[key]
        for name in (
            "attempts_total",
            "failed_attempts",
            "step",
            "total_steps",
            "step_seconds",
            "predicted_step_seconds",
            "gpus",
            "checkpoint_age_seconds",
        )
    } == {
        "attempts_total": 2,
        "failed_attempts": 1,
        "step": 7,
        "total_steps": 100,
        "step_seconds": 12.5,
        "predicted_step_seconds": 11,
        "gpus": 16,
        "checkpoint_age_seconds": 120,
    }
    assert values(families["rlhf_job_last_failure"]) == {("full", "team", "NodeLost"): 1}
    phases = values(families["rlhf_job_phase"])
    assert phases["full", "team", "Running"] == 1
    assert sum(phases.values()) == 1
    assert {phase for *_, phase in phases} == {*get_args(Phase)} - {"Stopped"}
    assert not families["rlhf_job_queue_seconds"].samples


def test_a_queued_job_shows_how_long_it_waits_and_no_gpus() -> None:
    families = scraped(metrics_of([job("waiting", QUEUED)]))
    assert values(families["rlhf_job_queue_seconds"]) == {("waiting", "team"): 30}
    assert not families["rlhf_job_gpus"].samples
    assert not families["rlhf_job_step"].samples


def test_the_time_before_an_attempt_is_none_in_the_queue() -> None:
    attempt = {"attempt": 2, "startTime": "2026-03-01T11:59:50Z", "slots": 8}
    families = scraped(metrics_of([job("resumed", {**QUEUED, "attempt": 2, "attempts": [attempt]})]))
    assert values(families["rlhf_job_queue_seconds"]) == {("resumed", "team"): 10}


@each_case("phase", ["Provisioning", "Initializing", "Running", "Suspending"])
def test_a_job_with_pods_holds_gpus(phase: str) -> None:
    families = scraped(metrics_of([job("held", {**WHOLE, "phase": phase})]))
    assert values(families["rlhf_job_gpus"]) == {("held", "team"): 16}


def test_an_ended_job_holds_no_gpus_and_its_save_ages_not() -> None:
    families = scraped(metrics_of([job("over", {**WHOLE, "phase": "Succeeded"})]))
    assert not families["rlhf_job_gpus"].samples
    assert not families["rlhf_job_checkpoint_age_seconds"].samples
    assert values(families["rlhf_job_step"]) == {("over", "team"): 7}


def spent_by(account: Account) -> dict[str, dict[tuple[str, ...], float]]:
    names = ("rlhf_job_phase_seconds_total", "rlhf_job_gpu_seconds_total", "rlhf_job_cost_total")
    return {name: dict(samples_of(account)[name]) for name in names}


def test_a_job_is_charged_for_the_time_with_pods() -> None:
    accounts: dict[str, Account] = {}
    moment = NOW
    for phase, seconds in [("Queued", 60), ("Provisioning", 30), ("Running", 100), ("Succeeded", 500)]:
        accounts = look(accounts, [job("full", {**WHOLE, "phase": phase})], moment)
        moment += timedelta(seconds=seconds)
    accounts = look(accounts, [job("full", {**WHOLE, "phase": "Succeeded"})], moment)
    assert spent_by(accounts["uid-full"]) == {
        "rlhf_job_phase_seconds_total": {("Queued",): 60, ("Provisioning",): 30, ("Running",): 100},
        "rlhf_job_gpu_seconds_total": {("Queued",): 960, ("Provisioning",): 480, ("Running",): 1600},
        "rlhf_job_cost_total": {(): pytest.approx(36 * 130 / 3600)},
    }


def test_a_job_without_prices_has_no_cost_a_new_one_begins_at_0() -> None:
    mapping = {name: value for name, value in WHOLE["mapping"].items() if name != "pricePerHour"}
    unpriced = job("full", {**WHOLE, "mapping": mapping})
    accounts = look({}, [unpriced], NOW)
    accounts = look(accounts, [unpriced], NOW + timedelta(seconds=5))
    assert spent_by(accounts["uid-full"])["rlhf_job_cost_total"] == {}
    accounts = look(accounts, [], NOW + timedelta(seconds=10))
    accounts = look(accounts, [unpriced], NOW + timedelta(seconds=20))
    assert spent_by(accounts["uid-full"])["rlhf_job_phase_seconds_total"] == {("Running",): 0}


def test_conditions_and_the_interval_of_checkpoints_are_shown() -> None:
    twice = {**QUEUED, "conditions": QUEUED["conditions"] * 2}
    families = scraped(
        metrics_of([job("a", twice, {"checkpoint": {"everyMinutes": 2}}), job("b", spec={"checkpoint": 1})])
    )
    assert values(families["rlhf_job_condition"]) == {("QuotaReserved", "a", "team", "Pending", "False"): 1}
    assert values(families["rlhf_job_checkpoint_interval_seconds"]) == {("a", "team"): 120, ("b", "team"): 600}


def test_the_series_of_a_deleted_job_vanish() -> None:
    jobs = [job("one", WHOLE), job("two", WHOLE)]
    metrics = metrics_of(jobs)
    assert {"one", "two"} == {
        s.labels["name"] for f in scraped(metrics).values() for s in f.samples if "name" in s.labels
    }
    del jobs[0]
    assert {"two"} == {s.labels["name"] for f in scraped(metrics).values() for s in f.samples if "name" in s.labels}


def test_nothing_in_a_job_breaks_the_scrape_of_the_others() -> None:
    odd_time = {"step": 5, "uri": 'pvc://c/"\n\\', "time": "2026-99-99T99:99:99Z"}
    jobs = [
        job("odd-spec", spec={"algorithm": ["PPO"]}),
        job("no-spec", spec={}),
        job("odd-time", {"phase": "Running", "checkpoint": odd_time}),
        job("odd-text", {"lastFailure": {"reason": 'a"b\n\\c', "message": ""}, "queue": "\n"}),
        job("good", WHOLE),
    ]
    families = scraped(metrics_of(jobs))
    assert values(families["rlhf_job_step"]) == {("good", "team"): 7}
    assert values(families["rlhf_job_checkpoint_age_seconds"]) == {("good", "team"): 120}
    assert ("odd-text", "team", 'a"b\n\\c') in values(families["rlhf_job_last_failure"])


def test_only_the_leader_tells_of_jobs() -> None:
    leads = True
    metrics = OperatorMetrics(
        version="1",
        jobs=lambda: [job("full", WHOLE)],
        queue_depth=lambda: 0,
        failed_passes=dict,
        leads=lambda: leads,
        now=lambda: NOW,
    )
    assert values(scraped(metrics)["rlhf_job_info"])
    leads = False
    families = scraped(metrics)
    assert not [name for name in families if name.startswith("rlhf_job_") and families[name].samples]
    assert values(families["rlhf_operator_leader"]) == {(): 0}
    assert values(families["rlhf_operator_build_info"]) == {("1",): 1}


def test_the_probes_say_why_in_a_sentence() -> None:
    problems: dict[str, str | None] = {"health": None, "ready": "the caches are not filled yet"}

    async def probe() -> list[tuple[int, str]]:
        server = Server(metrics_of().registry, unhealthy=lambda: problems["health"], unready=lambda: problems["ready"])
        ports = free_ports()
        await server.start(ports)
        before = [await fetched(ports.probes, path) for path in ("/healthz", "/readyz")]
        problems.update(health="a pass has taken 601 s", ready=None)
        after = [await fetched(ports.probes, path) for path in ("/healthz", "/readyz", "/nothing")]
        await server.stop()
        return before + after

    assert asyncio.run(probe()) == [
        (200, "ok\n"),
        (503, "the caches are not filled yet\n"),
        (503, "a pass has taken 601 s\n"),
        (200, "ok\n"),
        (404, "404: Not Found"),
    ]


def test_a_port_that_is_taken_is_an_error_at_the_start() -> None:
    async def twice() -> None:
        first, second = (Server(metrics_of().registry, unhealthy=lambda: None, unready=lambda: None) for _ in range(2))
        ports = free_ports()
        await first.start(ports)
        try:
            with pytest.raises(OSError, match="in use"):
                await second.start(ports)
        finally:
            await first.stop()
            await second.stop()

    asyncio.run(twice())


def documented() -> list[tuple[str, ...]]:
    """The rows of the tables in docs/operator-metrics.md, without backquotes and heads."""
    lines = (ROOT / "docs" / "operator-metrics.md").read_text().splitlines()
    rows = [line.strip("|").replace("`", "").split("|") for line in lines if line.startswith("| `")]
    return [tuple(cell.strip() for cell in row) for row in rows]


def test_the_documentation_names_exactly_what_is_exported() -> None:
    metrics = metrics_of([job("full", WHOLE), job("waiting", QUEUED)])
    metrics.reconciled("done", 0.1)
    metrics.requested("get", "pods", 200)
    scraped(metrics)  # what is spent has no phase before the second look
    families = scraped(metrics)
    exported = {}
    for name, family in families.items():
        if name.startswith("rlhf_") and not name.endswith("_created"):
            (labels,) = {tuple(sorted(set(sample.labels) - {"le"})) for sample in family.samples}
            exported[name] = (family.type, labels, family.documentation)
    rows = documented()
    assert {r[0]: (r[1], tuple(sorted(r[3].split(", "))) if r[3] else (), r[4]) for r in rows} == exported
    expected = [(m.name, m.kind, m.unit) for m in OPERATOR_METRICS]
    expected += [(m.name, m.kind, m.unit) for m in JOB_METRICS]
    assert [row[:3] for row in rows] == expected
