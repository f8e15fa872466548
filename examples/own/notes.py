"""A callback: a line in a file of its own for each step."""

from pathlib import Path
from typing import Any


class Notes:
    def __init__(self, *, file: str, metric: str) -> None:
        self._file, self._metric = Path(file), metric

    def step(self, record: dict[str, float]) -> None:
        """`record` is a line of metrics.jsonl."""
        with self._file.open("a") as file:
            file.write(f"step {record['step']:.0f}: {record[self._metric]:.3f}\n")

    def close(self, summary: dict[str, Any]) -> None:
        """`summary` has `phase` and, after Succeeded, the job's part of summary.json."""
        with self._file.open("a") as file:
            file.write(f"{summary['phase']}, {summary.get('steps', 'some')} steps\n")
