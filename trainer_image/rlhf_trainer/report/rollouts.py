"""`rollouts.html`: responses that a run learned from, with filters; a page of its own, for it holds many texts."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlhf_planning.numbers import shortened
from rlhf_trainer.report.template import rendered, script
from rlhf_trainer.run_folder.rollouts import NUMBERS, parsed

T = TypeVar("T")
Place = tuple[int, int]
"""Step, and row in it."""
PAGE = "rollouts.html"
MOST_ROWS, MOST_CHARACTERS = 1000, 2000


@dataclass(frozen=True)
class Rollouts:
    """Kept responses of a job, of which the page shows some."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """Those that are shown, by step and row."""
    kept: int = 0
    steps: int = 0
    damaged: int = 0
    """Lines that cannot be read."""


def read_rollouts(file: Path) -> Rollouts:
    """Some of the rows of a file that may not fit into memory; nothing if there is no file."""
    if not file.is_file():
        return Rollouts()
    starts: dict[Place, int] = {}
    damaged = start = 0
    with file.open("rb") as lines:
        for line in lines:
            if row := parsed(line):
                starts[row["step"], row["row"]] = start
            elif line.strip():
                damaged += 1
            start += len(line)
        rows = []
        for place in evenly(starts, MOST_ROWS):
            lines.seek(starts[place])
            rows.append(parsed(lines.readline()))
    return Rollouts(rows, len(starts), len({step for step, _ in starts}), damaged)


def evenly(places: Collection[Place], most: int) -> list[Place]:
    """At most so many of the places, the same number of each step where it has as many, spread over its rows."""
    by_step: dict[int, list[Place]] = defaultdict(list)
    for place in sorted(places):
        by_step[place[0]].append(place)
    steps = sorted(_spread(list(by_step.values()), most), key=len)
    chosen: list[Place] = []
    for done, rows in enumerate(steps):
        chosen += _spread(rows, (most - len(chosen)) // (len(steps) - done))
    return sorted(chosen)


def render(name: str, jobs: Mapping[str, Rollouts]) -> str:
    """The page about the jobs of a run. Its only script is ours, which shows texts as texts."""
    rows = [_row(job, row) for job, found in jobs.items() for row in found.rows]
    return rendered("rollouts.html", {"name": name, "jobs": jobs, "data": {"rows": rows}, **script("rollouts.js")})


def _spread(items: Sequence[T], most: int) -> list[T]:
    count = min(len(items), most)
    return [items[index * len(items) // count] for index in range(count)]


def _row(job: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """What the page holds of a row; a number that is not finite is null, for JSON knows none."""
    parts, columns = row.get("reward_parts"), row.get("columns")
    return {
        "job": job,
        "step": row["step"],
        "row": row["row"],
        "finished": bool(row.get("finished")),
        "prompt": shortened(row["prompt"], MOST_CHARACTERS),
        "response": shortened(row["response"], MOST_CHARACTERS),
        "columns": shortened(json.dumps(columns, ensure_ascii=False), MOST_CHARACTERS) if columns else "",
        "parts": {str(name): _number(value) for name, value in parts.items()} if isinstance(parts, dict) else {},
        **{name: _number(row.get(name)) for name in NUMBERS},
    }


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
