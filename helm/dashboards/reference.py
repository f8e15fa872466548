"""Pages docs/metrics.md and docs/operator-metrics.md, generated from the tables of the trainer and of the operator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rlhf_operator.metrics import JOB_METRICS, OPERATOR_METRICS, Metric
from rlhf_trainer.run_folder.step_metrics import METRICS, PLANNED_STEPS, WARNINGS, StepMetric

DOCS = Path(__file__).resolve().parents[2] / "docs"
TRAINING = """\
# Metrics of the training

For readers who look up a metric; [monitoring](monitoring.md) says where they appear and what their labels mean.

"""
OPERATOR = """\
# Metrics of the operator

For readers who look up a metric; [monitoring](monitoring.md) says what their labels mean. The usual
`process_*` metrics (memory, CPU, open files) are there too.

"""


def pages() -> Mapping[Path, str]:
    """Return the text of each page by its path."""
    operator = table("metric", OPERATOR_METRICS)
    jobs = table("metric", JOB_METRICS)
    return {
        DOCS / "metrics.md": TRAINING + table("metrics.jsonl | Prometheus", METRICS),
        DOCS / "operator-metrics.md": f"{OPERATOR}{operator}\nOf each job:\n\n{jobs}",
    }


def table(first: str, metrics: Iterable[StepMetric | Metric]) -> str:
    """Return a table in Markdown with a row a metric; `first`: heads of the columns of names."""
    heads = f"| {first} | type | unit | labels | meaning |\n"
    return f"{heads}|{'---|' * (heads.count('|') - 1)}\n{''.join(_rows(metrics))}"


def _rows(metrics: Iterable[StepMetric | Metric]) -> Iterator[str]:
    for metric in metrics:
        cells = [
            f"`{metric.name}`",
            metric.kind,
            metric.unit,
            ", ".join(f"`{label}`" for label in metric.labels),
            metric.meaning,
        ]
        if isinstance(metric, StepMetric):
            cells.insert(0, "" if metric.recorded in (PLANNED_STEPS, WARNINGS) else f"`{metric.recorded}`")
        yield f"| {' | '.join(cells)} |\n"
