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
WIN_RATE = "prompts with a better response than before, ties half; 0.5 is no change; before: two draws from one model"


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
            names = _score_names(job.samples)
            changes = [_change(row, _decider(names)) for row in job.samples if names]
            wins = [TIE if change == 0 else float(change > 0) for change in changes]
            found.append(_row(job, "win rate", before.get(name), value, TIE, wins, WIN_RATE))
        elif name in before:
            changes = [_change(row, name) for row in job.samples if _has(row, name)]
            note = f"mean of {len(changes)} held-out prompts" if len(changes) > 1 else ""
            found.append(_row(job, name, before[name], value, before[name], changes, note))
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
        distributions=[(name, plots.distributions(f"{job.name} {name}", *_scores(job, name))) for name in names],
    )


def _row(
    job: JobRecord, name: str, before: float | None, after: float, null: float, samples: Sequence[float], note: str
) -> MetricRow:
    """Return a row with the change from `null` to `after`, and its interval by the samples, if there are several."""
    change, is_gain = signed(after - null), None
    if len(samples) > 1:
        margin = CONFIDENCE * statistics.stdev(samples) / math.sqrt(len(samples))
        change += f" ± {margin:.2g}"
        is_gain = after > null if abs(after - null) > margin else None
    return MetricRow(job.name, name, "" if before is None else number(before), number(after), change, is_gain, note)


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


def _scores(job: JobRecord, name: str) -> list[list[float]]:
    return [[float(row[f"{name}_{when}"]) for row in job.samples] for when in WHEN]


def _change(row: dict[str, Any], name: str) -> float:
    return float(row[f"{name}_after"]) - float(row[f"{name}_before"])


def text_of(row: dict[str, Any], name: str) -> str:
    """Return the prompt or a response of a row for the page: not too long, a prompt without blank lines."""
    text = str(row.get(name, "")).strip()
    return shortened(re.sub(r"\n\s*\n", "\n", text) if name == "prompt" else text, MAX_CHARACTERS)
