"""What was measured on held-out data, before and after: the means, their certainty, and the responses."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rlhf_planning.numbers import number, shortened, signed
from rlhf_trainer.report import plots
from rlhf_trainer.report.reading import JobRecord

HIGHLIGHTS, MOST_ROWS, MOST_CHARACTERS = 3, 250, 2000
WHEN = ("before", "after")
CONFIDENCE = 1.96
"""Standard errors on each side of a mean that hold its true value in 95 of 100 cases."""
TIE = 0.5
BLANK_LINES = re.compile(r"\n\s*\n")
NO_MEASURES = ("steps", "seconds", "seed")


@dataclass(frozen=True)
class Measure:
    """A row of the table on top: what a job measured on held-out data."""

    job: str
    name: str
    before: str
    after: str
    change: str
    is_gain: bool | None
    """Whether the change is surely up (True), surely down (False), or could be chance or is unknown (None)."""
    note: str


@dataclass(frozen=True)
class Score:
    """A score of one held-out prompt's responses."""

    name: str
    before: str
    after: str
    change: float


@dataclass(frozen=True)
class Sample:
    """A held-out prompt and its responses."""

    prompt: str
    before: str
    after: str
    scores: list[Score]


@dataclass(frozen=True)
class Samples:
    """The held-out rows that the page shows, and how many there are."""

    total: int
    decider: str
    """The score by which the rows are chosen."""
    groups: list[tuple[str, list[Sample]]]
    rest: list[Sample]
    distributions: list[tuple[str, Markup]]


def measures(job: JobRecord) -> list[Measure]:
    """What summary.json says of a job."""
    found = []
    values = {name: value for name, value in job.summary.items() if isinstance(value, int | float)}
    for name, value in values.items():
        if name in NO_MEASURES or name == "win_rate_null" or name.endswith("_after"):
            continue
        stem = name.removesuffix("_before")
        if stem != name and f"{stem}_after" in values:
            found.append(_paired(job, stem, value, values[f"{stem}_after"]))
        elif name == "win_rate":
            found.append(_win_rate(job, value, values.get("win_rate_null")))
        else:
            found.append(Measure(job.name, name, "", number(value), "", None, "measured once, after training"))
    return found


def samples(job: JobRecord) -> Samples | None:
    """The rows of samples.jsonl by how much their score changed; None if there are none."""
    names = _score_names(job.samples)
    if not job.samples or not names:
        return None
    decider = _decider(job.samples) or names[0]
    order = sorted(job.samples, key=lambda row: (_change(row, decider), _change(row, names[0])))
    shown = _spread(order)
    groups = [(title, [_sample(row, names) for row in rows]) for title, rows in shown.items()]
    chosen = {id(row) for rows in shown.values() for row in rows}
    rest = [row for row in job.samples if id(row) not in chosen][:MOST_ROWS]
    return Samples(
        total=len(job.samples),
        decider=decider,
        groups=groups,
        rest=[_sample(row, names) for row in rest],
        distributions=[
            (name, plots.distributions(f"{job.name} {name}", *(_column(job.samples, name, when) for when in WHEN)))
            for name in names
        ],
    )


def _paired(job: JobRecord, name: str, before: float, after: float) -> Measure:
    """A measure taken before and after, with the 95 % interval of its change over the held-out prompts."""
    changes = [_change(row, name) for row in job.samples if _has(row, name)]
    change, is_gain, note = signed(after - before), None, ""
    if len(changes) > 1:
        margin = _margin(changes)
        change += f" ± {margin:.2g}"
        is_gain = after > before if abs(after - before) > margin else None
        note = f"mean of {len(changes)} held-out prompts"
    return Measure(job.name, name, number(before), number(after), change, is_gain, note)


def _win_rate(job: JobRecord, value: float, null: float | None) -> Measure:
    change, is_gain = signed(value - TIE), None
    if len(job.samples) > 1 and (decider := _decider(job.samples)):
        margin = _margin([_outcome(_change(row, decider)) for row in job.samples])
        change += f" ± {margin:.2g}"
        is_gain = value > TIE if abs(value - TIE) > margin else None
    note = "prompts with a better response than before, ties half; 0.5 is no change; before: two draws from one model"
    return Measure(job.name, "win rate", "" if null is None else number(null), number(value), change, is_gain, note)


def _margin(values: Sequence[float]) -> float:
    """Half the 95 % interval of a mean."""
    return CONFIDENCE * statistics.stdev(values) / math.sqrt(len(values))


def _outcome(change: float) -> float:
    return 1.0 if change > 0 else TIE if change == 0 else 0.0


def _decider(rows: Sequence[dict[str, Any]]) -> str | None:
    """The score that decides who wins: the first evaluation function, or the reward if there is none."""
    names = _score_names(rows)
    return names[min(1, len(names) - 1)] if names else None


def _score_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The scores that every row has before and after, in the file's order."""
    names = [name.removesuffix("_before") for name in (rows[0] if rows else ()) if name.endswith("_before")]
    return [name for name in names if name != "response" and all(_has(row, name) for row in rows)]


def _has(row: dict[str, Any], name: str) -> bool:
    return all(isinstance(row.get(f"{name}_{when}"), int | float) for when in WHEN)


def _column(rows: Sequence[dict[str, Any]], name: str, when: str) -> list[float]:
    return [float(row[f"{name}_{when}"]) for row in rows]


def _change(row: dict[str, Any], name: str) -> float:
    return float(row[f"{name}_after"]) - float(row[f"{name}_before"])


def _spread(order: Sequence[dict[str, Any]]) -> dict[str, Sequence[dict[str, Any]]]:
    """The rows that gained most, those in the middle, and those that lost most, of rows in rising order."""
    if len(order) <= 3 * HIGHLIGHTS:
        return {"All held-out prompts, largest gain first": order[::-1]}
    middle = (len(order) - HIGHLIGHTS) // 2
    return {
        "Gained most": order[: -HIGHLIGHTS - 1 : -1],
        "Typical (around the median)": order[middle : middle + HIGHLIGHTS],
        "Lost most, or gained least": order[:HIGHLIGHTS],
    }


def _sample(row: dict[str, Any], names: Sequence[str]) -> Sample:
    scores = [
        Score(name, number(row[f"{name}_before"]), number(row[f"{name}_after"]), _change(row, name)) for name in names
    ]
    prompt, *responses = (str(row.get(key, "")).strip() for key in ("prompt", *(f"response_{when}" for when in WHEN)))
    before, after = (shortened(response, MOST_CHARACTERS) for response in responses)
    return Sample(shortened(BLANK_LINES.sub("\n", prompt), MOST_CHARACTERS), before, after, scores)
