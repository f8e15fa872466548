"""What is tried, and how: case N of a seed is always the same one."""

from __future__ import annotations

import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.commands import Case, manifests, plans, run_folders, settings
from tests.fuzz.objects import objects
from tests.fuzz.rows import rows

TARGETS: Mapping[str, Callable[[Path], Case]] = {
    make.__name__: make for make in (manifests, plans, settings, run_folders, rows, objects)
}


@dataclass
class Findings:
    """What came of many cases."""

    outcomes: Counter[str] = field(default_factory=Counter)
    defects: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Where it was raised -> the first such case, and its traceback."""


def tried(case: Case, *, cases: int, seed: int, first: int = 0) -> Findings:
    """So many cases."""
    found = Findings()
    for number in range(first, first + cases):
        try:
            found.outcomes[case(random.Random(f"{seed}:{number}"))] += 1
        except Exception as error:  # noqa: BLE001 this is what is looked for
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} at {frame.filename}:{frame.lineno}"
            found.defects.setdefault(where, (number, traceback.format_exc(limit=-12)))
            found.outcomes["DEFECT"] += 1
    return found


def tried_in_a_folder(make: Callable[[Path], Case], *, cases: int, seed: int, first: int = 0) -> Findings:
    """The same, with a temporary folder for files."""
    with tempfile.TemporaryDirectory(prefix="rlhf-fuzz-") as folder:
        return tried(make(Path(folder)), cases=cases, seed=seed, first=first)
