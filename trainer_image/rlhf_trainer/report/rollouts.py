"""Reader of responses that a run learned from: as many as a page can show, of all steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlhf_trainer.run_folder.rollouts import parse_row

T = TypeVar("T")
Place = tuple[int, int]
"""Place of a kept response: its step, and its row in the step's batch."""
MAX_ROWS = 1000


@dataclass(frozen=True)
class Rollouts:
    """Responses in a job's rollouts.jsonl: those that the page shows, and the numbers of all."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """Responses that the page shows, in the order of step and row."""
    kept: int = 0
    steps: int = 0
    damaged: int = 0
    """Number of lines of rollouts.jsonl that cannot be read."""


def read_rollouts(file: Path) -> Rollouts:
    """Read at most MAX_ROWS rows of a rollouts.jsonl that may not fit into memory; nothing if there is no file."""
    if not file.is_file():
        return Rollouts()
    starts: dict[Place, int] = {}
    damaged = start = 0
    with file.open("rb") as lines:
        for line in lines:
            if row := parse_row(line):
                starts[row["step"], row["row"]] = start
            elif line.strip():
                damaged += 1
            start += len(line)
        rows = []
        for place in evenly(starts, MAX_ROWS):
            lines.seek(starts[place])
            rows.append(parse_row(lines.readline()))
    return Rollouts(rows, len(starts), len({step for step, _ in starts}), damaged)


def evenly(places: Collection[Place], most: int) -> list[Place]:
    """Return at most `most` of the places: about as many of each step, spread over its rows."""
    by_step: dict[int, list[Place]] = defaultdict(list)
    for place in sorted(places):
        by_step[place[0]].append(place)
    steps = sorted(_spread(list(by_step.values()), most), key=len)
    chosen: list[Place] = []
    for done, rows in enumerate(steps):
        chosen += _spread(rows, (most - len(chosen)) // (len(steps) - done))
    return sorted(chosen)


def _spread(items: Sequence[T], most: int) -> list[T]:
    count = min(len(items), most)
    return [items[index * len(items) // count] for index in range(count)]
