"""Costs of CPU slots: the jobs of `work` with one and with two slots, and the costs that explain their steps best.

    python benchmarks/cpu_slots.py [--steps N] [--columns COLUMN ...]

Prints the costs of cpu_slots.yaml in rlhf_mapper beside those of this machine, and for each job the measured and the
predicted seconds of a step. Run it on a machine of two or more cores with nothing else on it, for about ten minutes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
from rich.console import Console
from rich.table import Table
from work import COLUMNS, RESPONSE_TOKENS, SIZES, Column, changed, host, make_inputs, manifest, medians, records_of, run

from rlhf_api.job import Job
from rlhf_mapper.cpu_slots import COSTS, UNITS, amounts_of
from rlhf_trainer.run.machine import cores
from rlhf_trainer.run.shapes import shapes_of

GENERATION = ("decode_products", "decode_layers", "sampled_tokens", "decode_reads")
TRAINING = tuple(name for name in UNITS if name not in GENERATION)
PHASES = {GENERATION: ("generation", "reshard"), TRAINING: ("scoring", "update")}


@dataclass(frozen=True)
class Case:
    """A job with a number of slots, and what was measured."""

    column: Column
    slots: int
    amounts: Mapping[str, float]
    seconds: Mapping[str, float]
    """Median seconds of a step by phase."""
    outside: float
    """Seconds of the run besides its steps."""
    bytes_: float
    """Memory of a slot's process."""

    @property
    def predicted(self) -> float:
        return sum(COSTS[unit] * amount for unit, amount in self.amounts.items())

    def of(self, phases: Sequence[str]) -> float:
        return sum(self.seconds[phase] for phase in phases)


def measured(column: Column, inputs: Path, slots: int, steps: int) -> Case:
    """Run a job with so many slots."""
    count = column.warm_up + steps
    document = changed(manifest(inputs, column.algorithm, steps=count), {"resources": {"slotsPerNode": slots}})
    job = Job.parse(document)
    amounts = amounts_of(job, shapes_of([job], job, inputs), slots, cores(), [float(RESPONSE_TOKENS)])
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        records = records_of(run([document], Path(folder)) / "step", steps=count)
    outside = time.monotonic() - began - sum(record["time/step"] for record in records)
    seconds = medians(records[column.warm_up :])
    return Case(column, slots, amounts, seconds, outside, records[-1]["memory_bytes/update"])


def fitted(cases: Sequence[Case], names: Sequence[str], phases: Sequence[str]) -> dict[str, float]:
    """Return the costs, none negative, by which the relative errors of these phases are smallest."""
    seconds = np.array([case.of(phases) for case in cases])
    table = np.array([[case.amounts[name] for name in names] for case in cases]) / seconds[:, None]
    kept = list(range(len(names)))
    while True:
        found = np.linalg.lstsq(table[:, kept], np.ones(len(cases)), rcond=None)[0]
        if (found >= 0).all():
            return dict.fromkeys(names, 0.0) | {
                names[place]: float(cost) for place, cost in zip(kept, found, strict=True)
            }
        kept.pop(int(found.argmin()))


def show(cases: Sequence[Case]) -> None:
    """Print the costs and how well those of the repository explain the steps."""
    found = {name: cost for names, phases in PHASES.items() for name, cost in fitted(cases, names, phases).items()}
    pairs = list(zip(cases[::2], cases[1::2], strict=True))
    found["start_seconds"] = mean(two.outside - one.outside for one, two in pairs)
    found["process_bytes"] = median(case.bytes_ for case in cases if case.column.size == "0.7M" and case.slots == 2)
    table = Table("cost", "here", "in the repository", title=host())
    for name, cost in found.items():
        table.add_row(name, f"{cost:.3g}", f"{COSTS[name]:.3g}")
    Console(width=100).print(table)
    steps = Table("", "slots", "measured, s", "predicted, s", "two / one measured", "predicted")
    for one, two in pairs:
        for case in (one, two):
            of_phases = case.seconds["step"], case.predicted
            ratios = two.seconds["step"] / one.seconds["step"], two.predicted / one.predicted
            steps.add_row(
                str(case.column),
                str(case.slots),
                *(f"{each:.2f}" for each in of_phases),
                *(f"{each:.2f}" if case is two else "" for each in ratios),
            )
    Console(width=100).print(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="of each job, after the first ones")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    options = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)
    cases = []
    for column in map(COLUMNS.__getitem__, options.columns):
        with tempfile.TemporaryDirectory() as inputs:
            make_inputs(Path(inputs), SIZES[column.size])
            cases += [measured(column, Path(inputs), slots, options.steps) for slots in (1, 2)]
    show(cases)


if __name__ == "__main__":
    main()
