"""What a run shows on the terminal: one line a step, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

SHOWN = {
    "loss/sft": ("loss", ".3f"),
    "loss/reward_model": ("loss", ".3f"),
    "accuracy/pairs": ("accuracy", ".2f"),
    "reward/mean": ("reward", ".2f"),
    "kl/reference": ("kl", ".3f"),
    "response_length/mean": ("length", ".1f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
}
"""Metric -> its label and format on the step line."""


class Display:
    """Lines for people; data is in the run folder."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self._started, self._first_step = time.monotonic(), 1

    def say(self, message: str) -> None:
        self.console.print(message, markup=False)

    def warn(self, message: str) -> None:
        self.console.print(f"warning: {message}", style="yellow", markup=False)

    def begin(self, first_step: int) -> None:
        """The clock of "time left" starts now, before the first step of this run."""
        self._started, self._first_step = time.monotonic(), first_step

    def step(self, name: str, record: Mapping[str, float], total_steps: int) -> None:
        """The line of a step: stage, step of total, what was measured, time left."""
        number = int(record["step"])
        shown = [f"{label} {record[key]:{form}}" for key, (label, form) in SHOWN.items() if key in record]
        spent = time.monotonic() - self._started
        left = spent / (number - self._first_step + 1) * (total_steps - number)
        self.say(f"{name:<14} {number:>4}/{total_steps}  {'  '.join(shown)}  left {_clock(left)}")

    def table(self, summary: Mapping[str, Mapping[str, Any]]) -> None:
        """Before and after of each job that measured both, and what was measured once."""
        table = Table(title="On held-out data")
        for column in ("job", "measure", "before", "after"):
            table.add_column(column, justify="left" if column in ("job", "measure") else "right")
        for name, values in summary.items():
            for measure, before, after in _measures(values):
                table.add_row(name, measure, before, after)
        if table.row_count:
            self.console.print(table)


def _measures(values: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(measure, before, after) of a job's summary; a measure taken once stands under "after"."""
    rows = []
    for key, value in values.items():
        if key in ("steps", "seconds", "seed") or key.endswith("_after") or not isinstance(value, float):
            continue
        if key.endswith("_before"):
            measure = key.removesuffix("_before")
            rows.append((measure, f"{value:.3f}", f"{values[measure + '_after']:.3f}"))
        elif key != "win_rate_null":
            null = f"{values['win_rate_null']:.3f} (itself)" if key == "win_rate" else ""
            rows.append((key if not null else "win rate against before", null, f"{value:.3f}"))
    return rows


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
