"""The dashboards are what their generator writes, and each of their queries and names is one that there is."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from helm.dashboards.__main__ import generated
from rlhf_api.job import Job
from rlhf_operator.metrics import (
    JOB_METRICS,
    OPERATOR_METRICS,
    Metric,
    OperatorMetrics,
)
from rlhf_trainer.outputs.metrics import PrometheusMetrics
from rlhf_trainer.run_folder.step_metrics import METRICS, StepMetric
from rlhf_trainer.telemetry import StepReport
from tests.helm.rendering import Helm
from tests.monitoring.rules import alerts, file_of_tests, input_of, lint, promtool, queries
from tests.operator.test_metrics import QUEUED, WHOLE, job

NAME = re.compile(r"\b(?:rlhf|process)_\w+")
LABELS = {"job": "ppo", "namespace": "team", "name": "ppo", "phase": "Running", "pod": "a", "le": "+Inf"}


def families() -> Iterator[StepMetric | Metric]:
    """The rows of all tables."""
    yield from METRICS
    yield from OPERATOR_METRICS
    yield from JOB_METRICS


def exported() -> dict[str, tuple[str, ...]]:
    """Name of each series -> its labels, those of the scrape too."""
    found: dict[str, tuple[str, ...]] = {"process_resident_memory_bytes": ("namespace", "pod")}
    for row in families():
        labels = tuple(dict.fromkeys((*row.labels, "namespace", "pod")))
        parts = {"summary": ("_sum", "_count"), "histogram": ("_sum", "_count", "_bucket")}.get(row.kind, ("",))
        for part in parts:
            found[f"{row.name}{part}"] = (*labels, "le") if part == "_bucket" else labels
    return found


def test_the_dashboards_are_as_generated() -> None:
    for file, text in generated().items():
        assert file.read_text() == text, f"{file.name}: make generate"


def test_every_panel_says_what_it_shows_and_none_lies_on_another() -> None:
    for text in generated().values():
        taken: set[tuple[int, int]] = set()
        for panel in json.loads(text)["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert place["x"] + place["w"] <= 24
            assert not taken & cells, panel["title"]
            taken |= cells
            assert panel["type"] == "row" or panel["description"]


def test_queries_and_alerts_name_what_is_exported(helm: Helm) -> None:
    asked = [*queries(), *(rule["expr"] for rule in alerts(helm).values())]
    assert {name for query in asked for name in NAME.findall(query)} <= set(exported())


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_a_query_gives_data_where_its_series_are(query: str, tmp_path: Path) -> None:
    series, labels = {}, {**LABELS, **dict(re.findall(r'(phase)="(\w+)"', query))}
    for name in set(NAME.findall(query)):
        own = ",".join(f'{label}="{labels.get(label, label)}"' for label in exported()[name])
        series[f"{name}{{{own}}}"] = "1+1x120" if name.endswith(("_total", "_sum", "_count", "_bucket")) else "1x120"
    wanted = {"expr": f"count({query}) > bool 0", "eval_time": "100m", "exp_samples": [{"labels": "{}", "value": 1}]}
    tests = [{"interval": "1m", "input_series": input_of(series), "promql_expr_test": [wanted]}]
    promtool("test rules", file_of_tests(tmp_path, [], tests))


def test_the_rules_are_well_formed(helm: Helm, tmp_path: Path) -> None:
    promtool("check rules", file_of_tests(tmp_path, list(alerts(helm).values()), []).with_name("rules.yml"))


def test_promtool_finds_no_fault_with_what_the_trainer_exports(sft: Job) -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    metrics.begin(sft, first_step=1, total_steps=4)
    names = [metric.recorded.replace("*", "x") for metric in METRICS]
    metrics.step(StepReport(record=dict.fromkeys(names, 1.0), warnings=["odd"], spans=()))
    assert lint(generate_latest(registry)) == ""


def test_promtool_finds_no_fault_with_what_the_operator_exports() -> None:
    moments = iter([datetime(2026, 3, 1, 12, 0, tzinfo=UTC) + timedelta(seconds=30 * each) for each in range(9)])
    metrics = OperatorMetrics(
        version="1.2.3",
        jobs=lambda: [job("full", WHOLE), job("waiting", QUEUED)],
        queue_depth=lambda: 0,
        failed_passes=dict,
        leads=lambda: True,
        now=lambda: next(moments),
    )
    metrics.reconciled("done", 0.1)
    metrics.requested("get", "pods", 200)
    generate_latest(metrics.registry)
    assert lint(generate_latest(metrics.registry)) == ""
