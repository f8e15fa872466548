"""Two revisions of this repository beside each other: python benchmarks/compare.py OLD NEW.

    python benchmarks/compare.py [--json PATH] [--columns COLUMN ...] [--rounds N] [--steps N] OLD NEW

OLD and NEW are revisions of git. Both train the jobs of `work`, as this file's tree writes them, with the libraries
that are installed here; they take turns. Printed is new / old for each phase: the median of the rounds and their range.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from work import (
    COLUMNS,
    PHASES,
    SIZES,
    Column,
    host,
    make_inputs,
    manifest,
    medians,
    ratio,
    records_of,
    run,
    spread,
)

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("crds", "operator", "trainer_image", "examples")


@contextmanager
def tree_of(revision: str) -> Iterator[Path]:
    """The files of a revision in a folder, for a while."""
    git = ["git", "-C", str(ROOT)]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", folder, revision], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", folder], check=True)


def measure(column: Column, trees: Sequence[Path], *, rounds: int, steps: int) -> dict[str, tuple[float, float, float]]:
    """new / old of each phase that takes time, as (median, lowest, highest) of the rounds."""
    with tempfile.TemporaryDirectory() as inputs:
        make_inputs(Path(inputs), SIZES[column.size])
        job = manifest(Path(inputs), column.algorithm, steps=column.warm_up + steps)
        pairs = [[seconds(job, tree, steps) for tree in trees] for _ in range(rounds)]
    shown = [phase for phase in (*PHASES, "step") if all(each[phase] for pair in pairs for each in pair)]
    return {phase: spread([new[phase] / old[phase] for old, new in pairs]) for phase in shown}


def seconds(job: Mapping[str, Any], tree: Path, steps: int) -> dict[str, float]:
    """Median seconds of the phases of the job's last steps, run by the code of a tree."""
    path = os.pathsep.join(str(tree / source) for source in SOURCES)
    with tempfile.TemporaryDirectory() as folder:
        done = run([job], Path(folder), environment={"PYTHONPATH": path})
        return medians(records_of(done / "step", steps=steps))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of each revision and round, after the first ones")
    options = parser.parse_args(arguments)
    with tree_of(options.old) as old, tree_of(options.new) as new:
        results = {
            name: measure(COLUMNS[name], (old, new), rounds=options.rounds, steps=options.steps)
            for name in options.columns
        }
    table = Table("", *results, title=f"{options.new} / {options.old}, seconds; {host()}")
    for phase in (*PHASES, "step"):
        table.add_row(phase, *(ratio(result[phase]) if phase in result else "" for result in results.values()))
    Console(width=110).print(table)
    if options.json:
        options.json.write_text(json.dumps({"host": host(), "columns": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
