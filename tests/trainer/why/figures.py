"""Figures of `why` on the recorded runs: `python -m tests.trainer.why.figures` prints them as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlhf_trainer.why.diagnosis import causes_of
from rlhf_trainer.why.seen import Seen
from tests.trainer.why.plants import FIGURES, HEALTHY, HEALTHY_FIGURES, PLANTS, TUNING, read

LOOK_STEPS = 5
LEAST_FIRST, LEAST_QUIET = 10, 19
"""Of 12 plants, those whose true cause is first; of 20 healthy runs, those without an alarm."""


def places(seeds: Sequence[int]) -> dict[str, list[int]]:
    """The place of the true cause in the answer about each plant's runs, from 1; 0 if the answer lacks it."""
    found = {}
    for name, plant in PLANTS.items():
        runs = read(name)
        answers = [names_of(runs[seed]) for seed in seeds if seed in runs]
        found[name] = [1 + answer.index(plant.cause) if plant.cause in answer else 0 for answer in answers]
    return found


def alarms(seeds: Sequence[int], *, watching: bool = False) -> dict[str, list[str]]:
    """The causes that are found in healthy runs, by run; watching: at any look of `watch.causes`."""
    found = {}
    for name in HEALTHY:
        for seed, seen in read(name).items():
            if seed in seeds:
                ends = range(LOOK_STEPS, len(seen.records) + 1, LOOK_STEPS) if watching else [len(seen.records)]
                found[f"{name}-{seed}"] = sorted({cause for end in ends for cause in names_of(up_to(seen, end))})
    return found


def up_to(seen: Seen, step: int) -> Seen:
    """The job as it was after a step."""
    rows = [row for row in seen.rows if row["step"] <= step]
    return replace(seen, records=[each for each in seen.records if each["step"] <= step], rows=rows)


def names_of(seen: Seen) -> list[str]:
    """The causes that a job shows, the likeliest first."""
    return [each.cause for each in causes_of("job", seen)]


def figures() -> dict[str, Any]:
    """Places of the true causes on the seeds of the figures, and how many healthy runs give no alarm."""
    found = places(FIGURES)
    runs, first, third = (sum(map(len, found.values())), *(_count(found, most) for most in (1, 3)))
    by_seed = [*zip(*found.values(), strict=True)]
    quiet = {
        kind: [not each for each in alarms(HEALTHY_FIGURES, watching=kind == "watched").values()] for kind in KINDS
    }
    return {
        "place of the true cause": found,
        "first": f"{first} of {runs}",
        "in the first three": f"{third} of {runs}",
        "causes first in every seed": sum(set(each) == {1} for each in found.values()),
        "healthy runs without alarm": {kind: f"{sum(each)} of {len(each)}" for kind, each in quiet.items()},
        "holds": all(_hold(each) for each in by_seed) and all(sum(each) >= LEAST_QUIET for each in quiet.values()),
    }


def _hold(of_a_seed: Sequence[int]) -> bool:
    return sum(place == 1 for place in of_a_seed) >= LEAST_FIRST and all(0 < place <= 3 for place in of_a_seed)


KINDS = ("at the end", "watched")


def _count(found: dict[str, list[int]], most: int) -> int:
    return sum(0 < place <= most for each in found.values() for place in each)


if __name__ == "__main__":
    if "--tuning" in sys.argv:
        print(json.dumps({"places": places(TUNING), "alarms": alarms(TUNING, watching=True)}))  # noqa: T201
    else:
        print(json.dumps(figures(), indent=2))  # noqa: T201
