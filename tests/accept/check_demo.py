"""Checks what the demo measured: python check_demo.py SUMMARY.json prints a table and exits 1 if a figure is bad."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RM, PPO = "helpful-rm", "helpful-ppo"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured number and the range it must lie in; a bound that is a name is another figure of the same job."""

    job: str
    name: str
    least: float = float("-inf")
    most: float = float("inf")
    above: str | None = None


FIGURES = (
    Figure(job=RM, name="pair_accuracy", least=0.9),
    Figure(job=PPO, name="win_rate", least=0.75),
    Figure(job=PPO, name="win_rate_null", least=0.4, most=0.6),
    Figure(job=PPO, name="reward_after", above="reward_before"),
    Figure(job=PPO, name="rule_after", above="rule_before"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    figure: str
    value: float | None
    expected: str
    good: bool


def check(summary: Mapping[str, Any], figures: tuple[Figure, ...] = FIGURES) -> list[Row]:
    """Each figure of a run's summary.json (job name -> measurements) against its range; a missing one is bad."""
    return [_row(summary.get(figure.job, {}), figure) for figure in figures]


def _row(measured: Mapping[str, Any], figure: Figure) -> Row:
    value = measured.get(figure.name)
    if figure.above is not None:
        other = measured.get(figure.above)
        expected = f"> {figure.above} ({_text(other)})"
        good = value is not None and other is not None and value > other
    else:
        bounds = ((">=", figure.least), ("<=", figure.most))
        expected = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if math.isfinite(bound))
        good = value is not None and figure.least <= value <= figure.most
    return Row(figure=f"{figure.job} {figure.name}", value=value, expected=expected, good=good)


def _text(value: float | None) -> str:
    return "missing" if value is None else f"{value:.3f}"


def table(rows: list[Row]) -> str:
    """The rows as text."""
    lines = [f"{'figure':<34}{'measured':>9}  expected"]
    lines += [
        f"{row.figure:<34}{_text(row.value):>9}  {row.expected}{'' if row.good else '   <-- missed'}" for row in rows
    ]
    return "\n".join(lines)


def main(path: Path) -> int:
    """Check one summary.json; 1 if a figure is bad."""
    if not path.is_file():
        print(f"error: {path} does not exist", file=sys.stderr)
        return 1
    rows = check(json.loads(path.read_text()))
    print(table(rows))
    missed = [row.figure for row in rows if not row.good]
    if missed:
        print(f"error: missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: check_demo.py SUMMARY.json")
    sys.exit(main(Path(sys.argv[1])))
