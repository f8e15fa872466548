"""Table of the metrics of a step: name in metrics.jsonl and for Prometheus, unit, section of the report, and meaning.

The metrics port, the report, the dashboards and docs/metrics.md take names, units and meanings from here.
"""

from typing import Literal, NamedTuple

from rlhf_api.tables import read_table

Kind = Literal["gauge", "counter", "summary"]
Section = Literal["learning", "health", ""]
PLANNED_STEPS, WARNINGS = "planned_steps", "warnings"
"""Metrics outside metrics.jsonl: status.json holds the planned steps, and events.log has a line for each warning."""


class StepMetric(NamedTuple):
    """A metric of a step: one row of step_metrics.yaml.

    A gauge holds the value of the latest step, a counter (`_total`) the sum over the steps of this run, a summary
    (`_seconds`) their sum and number.
    """

    recorded: str
    """Name of the metric in metrics.jsonl; in a metric family `*` stands for the value of the label."""
    name: str
    unit: str
    meaning: str
    section: Section = ""
    """Section of the report with the metric's plot; empty: no plot, as one step's value says little."""
    part: str = ""
    """Name of a metric family's label, such as `phase`; empty for a metric with one series."""
    repeats: bool = True
    """Whether a step that is made again, on the same kind of machine, has the same value to the bit."""

    @property
    def kind(self) -> Kind:
        """Return the metric's type for Prometheus, which the ending of its name tells."""
        return "counter" if self.name.endswith("_total") else "summary" if self.name.endswith("_seconds") else "gauge"

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the metric's labels for Prometheus."""
        return ("job", "algorithm", *([self.part] if self.part else []))


METRICS = read_table(__package__, "step_metrics.yaml", tuple[StepMetric, ...])
"""Metrics of a step in the order of the report."""
_ROWS = {metric.recorded: metric for metric in METRICS}


def metric_of(recorded: str) -> StepMetric | None:
    """Return the metric, or the metric family, of a name in metrics.jsonl; None for other names."""
    return _ROWS.get(recorded) or _ROWS.get(f"{recorded.partition('/')[0]}/*")


def repeats(recorded: str) -> bool:
    """Whether a metric has the same value if its step is repeated; True for names that METRICS does not list."""
    found = metric_of(recorded)
    return found is None or found.repeats
