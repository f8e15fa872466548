"""The answer to `why`: where a job changed, what moved first, the likely causes, the rows, and what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rlhf_api.tables import read_table
from rlhf_planning.numbers import number, shortened
from rlhf_trainer.why.changes import Change, change_of
from rlhf_trainer.why.rules import RULES, Shown
from rlhf_trainer.why.seen import Row, Seen

MAX_ROWS = 20
MARGIN = 0.25
"""Share of a healthy run's range by which a value may leave the range."""
MAX_PROMPT, MAX_TEXT = 40, 110
"""Most characters that are shown of a prompt and of a response."""


class Cause(NamedTuple):
    """Row of causes.yaml; in an answer of `why` the job's numbers are filled into the texts."""

    cause: str
    what: str
    signals: tuple[str, ...]
    evidence: str
    remedy: str
    set: str = ""
    """Argument of `--set` that makes the remedy's change; empty if there is none."""

    def warning(self) -> str:
        """Return cause, evidence and remedy."""
        advice = f"{self.remedy} (--set '{self.set}')" if self.set else self.remedy
        return f"likely cause of trouble: {self.what} ({self.cause}). {self.evidence} {advice}"


CAUSES = read_table(__package__, "causes.yaml", tuple[Cause, ...])
"""Causes in the order of an answer: a cause whose evidence is more direct may explain those after it."""
SIGNALS = tuple(dict.fromkeys(name for row in CAUSES for name in row.signals))
NO_CAUSE = "no cause found: the job shows none of the causes that are looked for"


@dataclass(frozen=True)
class Diagnosis:
    """The answer to `why` about one job."""

    change: Change | None
    """Change of the measure that judges the job, or else of the mean reward; None if neither changed."""
    first: Change | None
    """Earliest change of a signal, not after `change`; None if there is none."""
    causes: Sequence[Cause] = ()
    """Likely causes, the likeliest first; empty: no cause was found."""
    rows: Sequence[Row] = ()
    """Up to 20 responses that show the first cause; empty without a cause, or if no response shows it."""
    notes: Sequence[str] = field(default=())
    """Sentences on evidence that the job lacks."""

    def document(self) -> dict[str, Any]:
        """Return the answer as JSON types."""
        found = {"change": self.change, "first": self.first}
        changes = {name: each and {**asdict(each), "sentence": str(each)} for name, each in found.items()}
        causes = [cause._asdict() for cause in self.causes]
        return {**changes, "causes": causes, "rows": [dict(row) for row in self.rows], "notes": [*self.notes]}


def causes_of(name: str, seen: Seen) -> dict[Cause, Shown]:
    """Return the causes that a job of this name shows, the likeliest first, and the evidence of each."""
    limit = int(seen.section("data").get("maxResponseTokens") or 0)
    answer = {}
    for row in CAUSES:
        if shown := RULES[row.cause](seen):
            numbers = {"job": name, "twice": 2 * limit, "buffer": math.ceil(limit / 4), **shown.numbers}
            evidence, remedy, change = (each.format_map(numbers) for each in (row.evidence, row.remedy, row.set))
            answer[row._replace(evidence=evidence, remedy=remedy, set=change and f"{name}:{change}")] = shown
    return answer


def diagnose(name: str, seen: Seen) -> Diagnosis:
    """Return the diagnosis of a job of this name."""
    causes = causes_of(name, seen)
    change = change_of(seen.measure, seen.series(seen.measure))
    if change is None:
        change = change_of("reward/mean", seen.series("reward/mean"))
    rows = next((shown.rows for shown in causes.values()), ())
    signals = next((cause.signals for cause in causes), SIGNALS)
    return Diagnosis(change, _first_signal(signals, seen, change), [*causes], rows[:MAX_ROWS], _notes(seen))


def _first_signal(names: Sequence[str], seen: Seen, change: Change | None) -> Change | None:
    """Return the change of the signal that changed first, but not after the measure; None if no signal did.

    names: signals of the likeliest cause or, without a cause, all.
    """
    others = [name for name in names if not (change and name == change.name)]
    found = [moved for name in others if (moved := change_of(name, seen.series(name)))]
    before = [moved for moved in found if change is None or moved.step <= change.step]
    return min(before, key=lambda moved: (moved.step, -moved.evidence), default=None)


def _notes(seen: Seen) -> list[str]:
    notes = []
    if len(seen.series("response_length/mean")) and not seen.rows:
        notes.append("no responses were kept (rollout.keep), so causes that only they show are not looked for")
    if len(seen.series("reward/mean")) and not seen.is_judged_apart:
        notes.append("nothing but the reward judges the job during training (evaluation.everySteps with a function)")
    if (before := seen.summary.get(f"{seen.measure.removeprefix('evaluation/')}_before")) is not None:
        notes.append(f"the evaluation before training is no step ({seen.measure} was {number(before)})")
    return notes


def described(row: Row) -> str:
    """Return a kept response in a line: step, row, numbers, and the beginnings of prompt and response."""
    known = [name for name in ("reward", "advantage") if isinstance(row.get(name), int | float)]
    numbers = ", ".join(f"{name} {number(row[name])}" for name in known)
    tokens, ends = row.get("response_tokens", "?"), "" if row.get("finished", True) else ", cut off"
    place = f"step {row['step']}, row {row['row']}: {numbers}, {tokens} tokens{ends}"
    prompt, response = (" ".join(row[name].split()) for name in ("prompt", "response"))
    return f"{place}: {shortened(prompt, MAX_PROMPT)} -> {shortened(response, MAX_TEXT)}"


class Outside(NamedTuple):
    """Signal outside the range of the healthy run."""

    name: str
    step: int
    """Step from which on the signal stays outside."""
    value: float
    """Median of the signal's latest values."""
    low: float
    high: float


def outside(seen: Seen, healthy: Seen) -> list[Outside]:
    """Return the signals that end outside the healthy run's range, the farthest first, in units of that range."""
    found = []
    for name in dict.fromkeys([*SIGNALS, seen.measure]):
        mine, other = seen.series(name), healthy.series(name)
        if not len(mine) or not len(other):
            continue
        low, high = float(other.values.min()), float(other.values.max())
        room = max(high - low, 1e-3 * max(abs(low), abs(high)), 1e-9)
        distances = np.maximum(low - mine.values, mine.values - high) / room
        if np.median(distances[-5:]) > MARGIN:
            last_inside = max(np.flatnonzero(distances <= MARGIN), default=-1)
            step = int(mine.steps[min(last_inside + 1, len(mine) - 1)])
            found.append((float(distances[-1]), Outside(name, step, mine.last, low, high)))
    return [each for _, each in sorted(found, key=lambda pair: -pair[0])]
