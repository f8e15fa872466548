"""View of a job for the rules: its spec, its metrics as series over the steps, and the responses that were kept."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Series:
    """Values of a metric at the steps that have it, in the order of the steps."""

    steps: Array
    values: Array

    def __len__(self) -> int:
        return len(self.values)

    @property
    def first(self) -> float:
        """Median of the first five values; NaN without a value."""
        return median(self.values[:5])

    @property
    def last(self) -> float:
        """Median of the last five values; NaN without a value."""
        return median(self.values[-5:])


@dataclass(frozen=True)
class Seen:
    """Spec, metrics and kept responses of a job, as far as it has run."""

    spec: Mapping[str, Any]
    """`spec` of the job, with its defaults."""
    records: Sequence[Mapping[str, float]]
    """Lines of metrics.jsonl in the order of the steps."""
    rows: Sequence[Row] = field(default=())
    """Rows of rollouts.jsonl, of all steps or of the latest."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """The job's part of summary.json, such as `reward_before`; empty while the job runs."""

    def series(self, name: str) -> Series:
        """Return a metric over the steps that have a finite value of it."""
        found = [(record["step"], record[name]) for record in self.records if isfinite(record.get(name, nan))]
        steps, values = np.array(found, dtype=float).reshape(-1, 2).T
        return Series(steps, values)

    def option(self, path: str, default: Any = None) -> Any:
        """Return a field of the algorithm, such as `kl.coefficient`, also of an algorithm of the user's own."""
        found: Any = self.spec.get("algorithm") or {}
        found = found.get("options") or {} if found.get("name") == "Custom" else found
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return default if found is None else found

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of the spec; empty if it is unset."""
        return self.spec.get(name) or {}

    @property
    def group_size(self) -> int:
        """Responses to each prompt of a step."""
        return int(self.section("rollout").get("samplesPerPrompt") or 1)

    @cached_property
    def measure(self) -> str:
        """Metric that judges the job: an evaluated one other than the reward, the held-out reward, or the reward."""
        names = list(dict.fromkeys(name for record in self.records for name in record))
        evaluated = [name for name in names if is_apart(name)]
        known = [*evaluated, "evaluation/reward", "reward/mean"]
        return next((name for name in known if name in names), "")

    @property
    def is_judged_apart(self) -> bool:
        """Whether something other than the reward judges the job on held-out rows."""
        return is_apart(self.measure)

    @cached_property
    def groups(self) -> list[list[Row]]:
        """Kept responses by prompt and step, in the order of the steps."""
        found: dict[tuple[int, int], list[Row]] = defaultdict(list)
        for row in self.rows:
            found[row["step"], row["row"] // self.group_size].append(row)
        return [found[place] for place in sorted(found)]


NO_GOALS = {"reward", "win_rate", "response_tokens", "response_finished", "cost"}
"""Evaluated measures that come from the reward itself, or are no goal."""


def is_apart(name: str) -> bool:
    """Whether a metric is a measure of held-out rows by something other than the reward."""
    family, _, measure = name.partition("/")
    return family == "evaluation" and measure.rpartition("/")[2] not in NO_GOALS


def median(values: Array) -> float:
    """Return the median; NaN without a value."""
    return float(np.median(values)) if len(values) else float("nan")


def column(rows: Sequence[Row], name: str) -> Array:
    """Return a number of each row, NaN for a row without it."""
    return np.array([float(row[name]) if isinstance(row.get(name), int | float) else np.nan for row in rows])
