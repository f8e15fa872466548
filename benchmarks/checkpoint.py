"""Cost of an asynchronous checkpoint in PPO steps, for two sizes of Llama on CPU.

    python benchmarks/checkpoint.py [--json PATH]

The PPO job of benchmarks/work.py with a checkpoint every third step: in step 3n the ranks copy their state, in step
3n + 1 it is written in the background, in step 3n + 2 nothing of it goes on. The three kinds of steps of one run are
compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from work import SIZES, changed, make_inputs, manifest, records_of, run

EVERY = 3


def measure(size: str, *, steps: int) -> dict[str, float]:
    """Median seconds of the copy and of each kind of step; the first three steps, which warm up, are left out."""
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_inputs(Path(folder), SIZES[size])
        job = changed(manifest(Path(folder), "PPO", steps=steps), {"checkpoint": {"everySteps": EVERY}})
        records = records_of(run([job], Path(folder)) / "step", steps=steps - EVERY)
    kinds: dict[int, list[dict[str, float]]] = {0: [], 1: [], 2: []}
    for record in records:
        kinds[int(record["step"]) % EVERY].append(record)
    return {
        "parameters": parameters,
        "copy": median(record["time/checkpoint"] for record in kinds[0]),
        "step_with_copy": median(record["time/step"] for record in kinds[0]),
        "step_while_writing": median(record["time/step"] for record in kinds[1]),
        "step_alone": median(record["time/step"] for record in kinds[2]),
    }


def show(results: dict[str, dict[str, float]]) -> None:
    """The table of seconds, and of what they add to a step alone."""
    table = Table(title=f"medians of PPO steps with a checkpoint every {EVERY}")
    for column in ("actor", "step alone", "copy", "step with copy", "step while writing"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        alone = result["step_alone"]
        shares = [
            f"{result[key]:.2f} s ({result[key] / alone - 1:+.1%})" for key in ("step_with_copy", "step_while_writing")
        ]
        copy = f"{result['copy']:.3f} s ({result['copy'] / alone:.1%})"
        table.add_row(f"{name} ({result['parameters'] / 1e6:.1f} M)", f"{alone:.2f} s", copy, *shares)
    Console(width=110).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    options = parser.parse_args(arguments)
    results = {name: measure(name, steps=options.steps) for name in options.sizes}
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
