"""Fits coefficients to measurements: python benchmarks/fit.py ours|paper|slots [--rounds N] [--leave-out].

`ours` are the trainer's (tests/mapper/oracles/public.py has the points), stage by stage: decode steps first, then
updates on fixed rows, then scoring and generation of published phases and steps. `paper` are those of Megatron and
vLLM 0.3 (testbed.py): PPO with free layouts, as the mapper searches, and generation by t_g. A fit has the least mean
of the absolute logarithms of predicted / measured, by steps along one coefficient after the other that shrink; each
source counts as much as any other. `--leave-out` also fits without each source in turn, predicts it, and prints the
intervals that follow. Nothing is written. `slots` runs the jobs of `work` with one CPU slot and with two (six minutes,
on a machine with nothing else on it) and prints the costs of cpu_slots.yaml in rlhf_mapper that explain them.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median

import numpy as np
from rich.console import Console
from rich.table import Table
from work import COLUMNS, RESPONSE_TOKENS, SIZES, Column, changed, host, make_inputs, manifest, medians, records_of, run

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests is not installed

from rlhf_api.job import Job
from rlhf_mapper.coefficients import TRAINER, Efficiency
from rlhf_mapper.cpu_slots import COSTS, UNITS, amounts_of
from rlhf_mapper.search.pruned import pruned
from rlhf_trainer.run.machine import cores
from rlhf_trainer.run.shapes import shapes_of
from tests.mapper.oracles import public, testbed

TOKENS = 1024 * 2048
WORST = 10.0
"""Logarithm of the ratio of a point for which nothing fits."""
FIRST_STEP, SHRINK, LEAST = 0.4, 0.5, 0.02
"""Steps are by a factor; they shrink after a round that makes the loss smaller by less than this share."""
T90 = (3.08, 1.89, 1.64, 1.53, 1.48)
"""Student's t that 90 % do not exceed, by degrees of freedom: 80 % lie between it and its negative."""
INTERVALS: Mapping[str, Sequence[str]] = {"Sync": ("sync", "training"), "Training": ("training",)}
"""Kind of job -> kinds of points whose errors make its interval."""
BOUNDS: Mapping[str, tuple[float, float]] = {
    "kernel": (0.2, 1.2),
    "scoring": (0.2, 1.0),
    "prefill": (0.2, 1.2),
    "balance": (0.5, 1.0),
    "rollout": (0.3, 1.0),
    "memory": (0.4, 0.95),
    "link": (0.3, 0.95),
    "network": (0.3, 0.97),
    "decode_seconds": (1e-4, 3e-2),
    "sequence_seconds": (1e-6, 5e-4),
    "update_seconds": (1e-3, 1.0),
    "call_seconds": (1e-3, 2.0),
    "stage_seconds": (1e-5, 2e-2),
}


@dataclass(frozen=True)
class Point:
    """Measured seconds, and those that are predicted with coefficients; inf where nothing fits."""

    source: str
    kind: str
    seconds: float
    predict: Callable[[Efficiency], float]


Points = Mapping[str, Point]
Stage = tuple[Points, Sequence[str]]
"""Points, and the coefficients that are fitted to them."""


def _of(points: Sequence[public.Point]) -> dict[str, Point]:
    def predict(point: public.Point, efficiency: Efficiency) -> float:
        return point.predict(public.software_of(efficiency))

    return {each.name: Point(each.source, each.kind, each.seconds, partial(predict, each)) for each in points}


def ours() -> list[Stage]:
    """Decoding, updates of rows of one length, and what jobs with several ranks and lengths take."""
    phases, steps = public.phase_points(), public.step_points()
    alone = [each for each in phases if each.kind == "training"]
    jobs = [each for each in (*phases, *steps) if each.kind in ("sync", "scoring")]
    return [
        (_of([each for each in phases if each.kind == "decode"]), ("decode_seconds", "sequence_seconds", "prefill")),
        (_of(alone), ("kernel",)),
        (_of(jobs), ("rollout", "balance", "scoring", "call_seconds")),
    ]


def paper() -> list[Stage]:
    """PPO of HybridFlow with free layouts, and its generation by t_g."""
    points = {
        f"{size} on {gpus}": Point("HybridFlow", "sync", TOKENS / speed, partial(step_seconds, size, gpus))
        for (size, gpus), speed in testbed.THROUGHPUT.items()
    } | {
        f"{size} generation, t_g {t_g}": Point(
            "HybridFlow", "sync", taken, partial(testbed.generation_seconds, size, t_g)
        )
        for size, published in testbed.GENERATION.items()
        for t_g, taken in published.items()
    }
    shared = [name for name in BOUNDS if name not in ("scoring", "prefill", "balance", "rollout")]
    return [(points, shared)]


def step_seconds(size: testbed.Size, gpus: int, efficiency: Efficiency) -> float:
    costs = testbed.costs_of(size, gpus, layout=False, efficiency=efficiency)
    found = pruned(costs, testbed.roles("PPO"), keep=1)
    return found[0].seconds if found else math.inf


SETS: Mapping[str, tuple[Callable[[], list[Stage]], Efficiency]] = {
    "ours": (ours, TRAINER.efficiency),
    "paper": (paper, testbed.EFFICIENCY),
}


def residuals(points: Points, efficiency: Efficiency) -> dict[str, float]:
    """Logarithm of predicted / measured seconds of each point."""
    predicted = {name: point.predict(efficiency) for name, point in points.items()}
    return {
        name: math.log(predicted[name] / point.seconds) if predicted[name] < math.inf else WORST
        for name, point in points.items()
    }


def loss_of(points: Points, efficiency: Efficiency) -> float:
    """Mean over the sources of the mean absolute residual."""
    of_source: dict[str, list[float]] = defaultdict(list)
    for name, left in residuals(points, efficiency).items():
        of_source[points[name].source].append(abs(left))
    return mean(map(mean, of_source.values()))


def fitted(points: Points, start: Efficiency, names: Sequence[str], rounds: int) -> Efficiency:
    """The best that steps along single coefficients find."""
    best, least, step = start, loss_of(points, start), FIRST_STEP
    for _ in range(rounds):
        before = least
        for name in names:
            low, high = BOUNDS[name]
            values = (getattr(best, name) * factor for factor in (1 + step, 1 / (1 + step)))
            tried = [replace(best, **{name: min(max(value, low), high)}) for value in values]
            candidates = [(best, least), *((each, loss_of(points, each)) for each in tried)]
            best, least = min(candidates, key=lambda pair: pair[1])
        if least > before * (1 - LEAST):
            step *= SHRINK
    return best


def fitted_stages(stages: Sequence[Stage], start: Efficiency, rounds: int, *, without: str = "") -> Efficiency:
    """Fit one stage after the other; without: source whose points are left out."""
    for points, names in stages:
        kept = {name: point for name, point in points.items() if point.source != without}
        start = fitted(kept, start, names, rounds) if kept else start
    return start


def held_out() -> dict[str, Point]:
    """Points that no fit uses."""
    return _of([each for each in public.step_points() if each.kind not in ("sync", "scoring")])


def left_out(stages: Sequence[Stage], start: Efficiency, rounds: int) -> dict[str, float]:
    """Residual of each point, predicted with coefficients that its source had no part in."""
    every = {name: point for points, _ in stages for name, point in points.items()} | held_out()
    found: dict[str, float] = {}
    for source in sorted({point.source for point in every.values()}):
        efficiency = fitted_stages(stages, start, rounds, without=source)
        found |= residuals({name: each for name, each in every.items() if each.source == source}, efficiency)
        print(f"without {source}: {_values(efficiency, stages)}", file=sys.stderr)
    return found


def interval(points: Points, left: Mapping[str, float]) -> float:
    """Factor f so that measured / predicted of a new source lies in 1/f to f with a probability of 80 %.

    Sources are few: Student's t of the mean logarithm of each source that was left out, around 0.
    """
    of_source: dict[str, list[float]] = defaultdict(list)
    for name, each in left.items():
        of_source[points[name].source].append(each)
    means = [mean(each) for each in of_source.values()]
    spread = math.sqrt(mean(each**2 for each in means) * (1 + 1 / len(means)))
    return math.exp(T90[min(len(means) - 1, len(T90)) - 1] * spread) if len(means) > 1 else math.inf


def _values(efficiency: Efficiency, stages: Sequence[Stage]) -> str:
    return ", ".join(f"{name} {getattr(efficiency, name):.3g}" for _, names in stages for name in names)


def _print_residuals(title: str, points: Points, left: Mapping[str, float]) -> None:
    table = Table("source", "kind", "point", "predicted / measured", title=title, title_justify="left")
    for name, each in sorted(left.items(), key=lambda pair: (points[pair[0]].source, pair[0])):
        table.add_row(points[name].source, points[name].kind, name, f"{math.exp(each):.2f}")
    Console(width=120).print(table)
    for kind in dict.fromkeys(points[name].kind for name in left):
        off = [abs(math.expm1(each)) for name, each in left.items() if points[name].kind == kind]
        print(f"{kind}: off by {mean(off):.1%} on average, {max(off):.1%} at worst of {len(off)}")


SLOT_STEPS = 4
GENERATION = ("decode_products", "decode_layers", "sampled_tokens", "decode_reads")
TRAINING = tuple(name for name in UNITS if name not in GENERATION)
PHASES = {GENERATION: ("generation", "reshard"), TRAINING: ("scoring", "update")}


@dataclass(frozen=True)
class SlotRun:
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


def run_on_slots(column: Column, inputs: Path, slots: int) -> SlotRun:
    """Run a job with so many slots."""
    count = column.warm_up + SLOT_STEPS
    document = changed(manifest(inputs, column.algorithm, steps=count), {"resources": {"slotsPerNode": slots}})
    job = Job.parse(document)
    amounts = amounts_of(job, shapes_of([job], job, inputs), slots, cores(), [float(RESPONSE_TOKENS)])
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        records = records_of(run([document], Path(folder)) / "step", steps=count)
    outside = time.monotonic() - began - sum(record["time/step"] for record in records)
    seconds = medians(records[column.warm_up :])
    return SlotRun(column, slots, amounts, seconds, outside, records[-1]["memory_bytes/update"])


def fitted_costs(cases: Sequence[SlotRun], names: Sequence[str], phases: Sequence[str]) -> dict[str, float]:
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


def show_costs(cases: Sequence[SlotRun]) -> None:
    """Print the costs and how well those of the repository explain the steps."""
    found = {
        name: cost for names, phases in PHASES.items() for name, cost in fitted_costs(cases, names, phases).items()
    }
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


def fit_slots() -> None:
    """Run the jobs with one slot and with two, and print what explains their steps best."""
    os.environ.pop("OMP_NUM_THREADS", None)
    runs = []
    for column in COLUMNS.values():
        with tempfile.TemporaryDirectory() as inputs:
            make_inputs(Path(inputs), SIZES[column.size])
            runs += [run_on_slots(column, Path(inputs), slots) for slots in (1, 2)]
    show_costs(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=(*SETS, "slots"))
    parser.add_argument("--rounds", type=int, default=8, help="0: only what is left with the coefficients as they are")
    parser.add_argument("--leave-out", action="store_true")
    options = parser.parse_args()
    if options.set == "slots":
        fit_slots()
        return
    make, start = SETS[options.set]
    stages = make()
    best = fitted_stages(stages, start, options.rounds)
    points = {name: point for each, _ in stages for name, point in each.items()}
    _print_residuals(f"{options.set}: what is left", points, residuals(points, best))
    if options.leave_out:
        points |= held_out()
        left = left_out(stages, start, options.rounds)
        _print_residuals("each source left out of its fit", points, left)
        for kind, kinds in INTERVALS.items():
            factor = interval(points, {name: each for name, each in left.items() if points[name].kind in kinds})
            print(f"interval of {kind}: {1 / factor:.2f} to {factor:.2f}")
    names = {name for _, each in stages for name in each}
    for name, value in asdict(best).items():
        note = "  # at a bound" if value in BOUNDS.get(name, ()) else "" if name in names else "  # given"
        print(f"    {name}={value:.3g},{note}")


if __name__ == "__main__":
    main()
