"""Evaluation on held-out data before and after training: means with confidence intervals, and responses."""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rlhf_planning.comparison import before_and_after
from rlhf_planning.numbers import number, shortened, signed
from rlhf_trainer.report import plots
from rlhf_trainer.report.run_record import JobRecord

HIGHLIGHTS, MAX_ROWS, MAX_CHARACTERS = 3, 250, 2000
WHEN = ("before", "after")
CONFIDENCE = 1.96
"""Number of standard errors on each side of a mean that make its 95 % confidence interval."""
TIE = 0.5


@dataclass(frozen=True)
class MetricRow:
    """Row of the table at the top of the page: a metric of a job on held-out data."""

    job: str
    name: str
    before: str
    after: str
    change: str
    is_gain: bool | None
    """Whether the change is up (True) or down (False) with 95 % confidence; None if it may be chance or is unknown."""
    note: str


@dataclass(frozen=True)
class SampleTable:
    """Lines of samples.jsonl that the page shows."""

    scores: list[str]
    """Names of the scores that every row has."""
    decider: str
    """Name of the score whose change chooses the highlighted rows."""
    groups: list[tuple[str, Sequence[dict[str, Any]]]]
    rest: list[dict[str, Any]]
    distributions: list[tuple[str, Markup]]


def measures(job: JobRecord) -> list[MetricRow]:
    """Return the page's table rows for a job's held-out metrics, which summary.json holds."""
    found = []
    before, after = before_and_after(job.summary)
    for name, value in after.items():
        if name == "win_rate":
            found.append(_win_rate(job, value, before.get(name)))
        elif name in before:
            found.append(_paired(job, name, before[name], value))
        else:
            found.append(MetricRow(job.name, name, "", number(value), "", None, "measured once, after training"))
    return found


def sample_table(job: JobRecord) -> SampleTable | None:
    """Return the table of held-out responses: largest, median and smallest gains, then others; None without scores."""
    names = _score_names(job.samples)
    if not job.samples or not names:
        return None
    decider = _decider(names)
    order = sorted(job.samples, key=lambda row: (_change(row, decider), _change(row, names[0])))
    middle = (len(order) - HIGHLIGHTS) // 2
    shown = {
        "Gained most": order[: -HIGHLIGHTS - 1 : -1],
        "Typical (around the median)": order[middle : middle + HIGHLIGHTS],
        "Lost most, or gained least": order[:HIGHLIGHTS],
    }
    if len(order) <= 3 * HIGHLIGHTS:
        shown = {"All held-out prompts, largest gain first": order[::-1]}
    chosen = {id(row) for rows in shown.values() for row in rows}
    return SampleTable(
        scores=names,
        decider=decider,
        groups=list(shown.items()),
        rest=[row for row in job.samples if id(row) not in chosen][:MAX_ROWS],
        distributions=[(name, _distribution(job, name)) for name in names],
    )


def _paired(job: JobRecord, name: str, before: float, after: float) -> MetricRow:
    changes = [_change(row, name) for row in job.samples if _has(row, name)]
    change, is_gain, note = signed(after - before), None, ""
    if len(changes) > 1:
        margin = _margin(changes)
        change += f" ± {margin:.2g}"
        is_gain = after > before if abs(after - before) > margin else None
        note = f"mean of {len(changes)} held-out prompts"
    return MetricRow(job.name, name, number(before), number(after), change, is_gain, note)


def _win_rate(job: JobRecord, value: float, null: float | None) -> MetricRow:
    change, is_gain = signed(value - TIE), None
    if len(job.samples) > 1 and (names := _score_names(job.samples)):
        changes = [_change(row, _decider(names)) for row in job.samples]
        margin = _margin([TIE if change == 0 else float(change > 0) for change in changes])
        change += f" ± {margin:.2g}"
        is_gain = value > TIE if abs(value - TIE) > margin else None
    note = "prompts with a better response than before, ties half; 0.5 is no change; before: two draws from one model"
    return MetricRow(job.name, "win rate", "" if null is None else number(null), number(value), change, is_gain, note)


def _margin(values: Sequence[float]) -> float:
    return CONFIDENCE * statistics.stdev(values) / math.sqrt(len(values))


def _decider(names: Sequence[str]) -> str:
    """Return the name of the score that ranks responses: the first evaluation function's, or else the reward's."""
    return names[min(1, len(names) - 1)]


def _score_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the scores that every row has before and after training, in the file's order."""
    names = [name.removesuffix("_before") for name in (rows[0] if rows else ()) if name.endswith("_before")]
    return [name for name in names if name != "response" and all(_has(row, name) for row in rows)]


def _has(row: dict[str, Any], name: str) -> bool:
    scores = [row.get(f"{name}_{when}") for when in WHEN]
    return all(isinstance(score, int | float) and math.isfinite(score) for score in scores)


def _distribution(job: JobRecord, name: str) -> Markup:
    before, after = ([float(row[f"{name}_{when}"]) for row in job.samples] for when in WHEN)
    return plots.distributions(f"{job.name} {name}", before, after)


def _change(row: dict[str, Any], name: str) -> float:
    return float(row[f"{name}_after"]) - float(row[f"{name}_before"])


def text_of(row: dict[str, Any], name: str) -> str:
    """Return the prompt or a response of a row for the page: not too long, a prompt without blank lines."""
    text = str(row.get(name, "")).strip()
    return shortened(re.sub(r"\n\s*\n", "\n", text) if name == "prompt" else text, MAX_CHARACTERS)
