"""What users write: rows, orders, schedules and callbacks that are right, and some that none should write."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TEXTS = ("ccc", "a", "too long", "bb")


def texts(*, more: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    return [*({"prompt": text, "chosen": text, "level": place} for place, text in enumerate(TEXTS)), *more]


def endless() -> Iterator[dict[str, Any]]:
    return ({"prompt": str(number % 10), "chosen": "x"} for number in itertools.count())


def nothing() -> list[dict[str, Any]]:
    return []


def words() -> list[str]:
    return ["one"]


def numbered() -> list[dict[int, str]]:
    return [{1: "a"}]


def two_types() -> list[dict[str, Any]]:
    return [{"prompt": "a", "chosen": "b"}, {"prompt": 1, "chosen": "b"}]


def breaks() -> Iterator[dict[str, Any]]:
    yield {"prompt": "a", "chosen": "b"}
    raise ZeroDivisionError("no more")


def by_level(rows: Sequence[dict[str, Any]], epoch: int, seed: int) -> list[int]:
    """The hardest row first, in the next epoch last; `seed` times in all."""
    found = sorted(range(len(rows)), key=lambda number: -int(rows[number]["level"]))
    return found[:: -1 if epoch % 2 else 1] if seed else found


def shortest_only(rows: Sequence[dict[str, Any]], epoch: int, seed: int) -> list[int]:  # noqa: ARG001
    shortest = min(range(len(rows)), key=lambda number: len(rows[number]["prompt"]))
    return [shortest] * len(rows)


def too_few(rows: Sequence[dict[str, Any]], epoch: int, seed: int) -> list[int]:  # noqa: ARG001
    return [0]


def beyond(rows: Sequence[dict[str, Any]], epoch: int, seed: int) -> list[int]:  # noqa: ARG001
    return [*range(1, len(rows) + 1)]


def never_the_same(rows: Sequence[dict[str, Any]], epoch: int, seed: int) -> list[int]:  # noqa: ARG001
    return random.sample(range(len(rows)), len(rows))


def halved(step: int, total_steps: int) -> float:
    return 1.0 if step <= total_steps / 2 else 0.5


def not_a_number(step: int, total_steps: int) -> float:  # noqa: ARG001
    return math.nan


class Told:
    """Writes what it is told, a line each."""

    def __init__(self, *, file: str, fails_at: int = 0, fails: int = 0) -> None:
        self._file, self._fails_at, self._fails = Path(file), fails_at, fails

    def step(self, record: dict[str, float]) -> None:
        if record["step"] == self._fails_at and self._fails:
            self._fails -= 1
            raise ZeroDivisionError("not now")
        self._write(record)

    def close(self, summary: dict[str, Any]) -> None:
        self._write(summary)

    def _write(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
