"""Fits coefficients to published figures: python benchmarks/fit.py ours|paper [--rounds N].

`ours` are those of the trainer (tests/mapper/oracles/public.py has the points), `paper` those of Megatron and vLLM 0.3
(testbed.py): PPO with free layouts, as the mapper searches, and generation by t_g. Least sum of the absolute
logarithms of predicted / published, so that no single point counts most, by steps along one coefficient after the other
that shrink. Prints the coefficients, what is left at each point, and which coefficients ended at a bound. Nothing is
written.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests is not installed

from rlhf_mapper.coefficients import TRAINER, Efficiency
from rlhf_mapper.search.pruned import pruned
from tests.mapper.oracles import public, testbed

TOKENS = 1024 * 2048
WORST = 10.0
"""Logarithm of the ratio of a point for which nothing fits."""
FIRST_STEP, SHRINK, LEAST = 0.4, 0.5, 0.02
"""Steps are by a factor; they shrink after a round that makes the sum smaller by less than this share."""
BOUNDS: Mapping[str, tuple[float, float]] = {
    "kernel": (0.2, 0.9),
    "memory": (0.4, 0.95),
    "link": (0.3, 0.95),
    "network": (0.3, 0.97),
    "decode_seconds": (1e-4, 3e-2),
    "sequence_seconds": (1e-6, 5e-4),
    "update_seconds": (1e-3, 1.0),
    "call_seconds": (1e-3, 2.0),
    "stage_seconds": (1e-5, 2e-2),
}
Points = Mapping[str, tuple[float, Callable[[Efficiency], float]]]
"""Published seconds, and those that are predicted with coefficients; inf where nothing fits."""


def ours() -> Points:
    """Steps, training and decoding of today's software."""
    return {
        **{name: (step.seconds, partial(public.step_seconds, step)) for name, step in public.STEPS.items()},
        **{name: (1 / given[-1], partial(public.trained_seconds, name)) for name, given in public.TRAINED.items()},
        **{name: (given[-1], partial(public.decoded_seconds, name)) for name, given in public.DECODED.items()},
    }


def paper() -> Points:
    """PPO of HybridFlow with free layouts, and its generation by t_g."""
    return {
        **{
            f"{size} on {gpus}": (TOKENS / speed, partial(step_seconds, size, gpus))
            for (size, gpus), speed in testbed.THROUGHPUT.items()
        },
        **{
            f"{size} generation, t_g {t_g}": (taken, partial(testbed.generation_seconds, size, t_g))
            for size, published in testbed.GENERATION.items()
            for t_g, taken in published.items()
        },
    }


def step_seconds(size: testbed.Size, gpus: int, efficiency: Efficiency) -> float:
    costs = testbed.costs_of(size, gpus, layout=False, efficiency=efficiency)
    found = pruned(costs, testbed.roles("PPO"), keep=1)
    return found[0].seconds if found else math.inf


SETS: Mapping[str, tuple[Callable[[], Points], Efficiency, Sequence[str]]] = {
    "ours": (ours, TRAINER.efficiency, ("kernel", "memory", "decode_seconds", "sequence_seconds")),
    "paper": (paper, testbed.EFFICIENCY, tuple(BOUNDS)),
}


def residuals(points: Points, efficiency: Efficiency) -> dict[str, float]:
    """Logarithm of predicted / published seconds of each point."""
    predicted = {name: predict(efficiency) for name, (_, predict) in points.items()}
    return {
        name: math.log(predicted[name] / published) if predicted[name] < math.inf else WORST
        for name, (published, _) in points.items()
    }


def fitted(points: Points, start: Efficiency, names: Sequence[str], rounds: int) -> Efficiency:
    """The best that steps along single coefficients find."""

    def loss(efficiency: Efficiency) -> float:
        return sum(map(abs, residuals(points, efficiency).values()))

    best, least, step = start, loss(start), FIRST_STEP
    for _ in range(rounds):
        before = least
        for name in names:
            low, high = BOUNDS[name]
            values = (getattr(best, name) * factor for factor in (1 + step, 1 / (1 + step)))
            tried = [replace(best, **{name: min(max(value, low), high)}) for value in values]
            best, least = min(((best, least), *((each, loss(each)) for each in tried)), key=lambda pair: pair[1])
        if least > before * (1 - LEAST):
            step *= SHRINK
        print(f"{least:.4f} with steps of {step:.3f}", file=sys.stderr)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--rounds", type=int, default=12, help="0: only what is left with the coefficients as they are")
    options = parser.parse_args()
    make, start, names = SETS[options.set]
    points = make()
    best = fitted(points, start, names, options.rounds)
    table = Table("point", "predicted / published", title=f"{options.set}: what is left", title_justify="left")
    left = {name: math.exp(each) for name, each in residuals(points, best).items()}
    for name, each in left.items():
        table.add_row(name, f"{each:.2f}")
    Console(width=100).print(table)
    off = [abs(each - 1) for each in left.values()]
    print(f"off by {sum(off) / len(off):.1%} on average, {max(off):.1%} at worst")
    for name, value in asdict(best).items():
        note = "  # at a bound" if value in BOUNDS.get(name, ()) else "" if name in names else "  # given"
        print(f"    {name}={value:.3g},{note}")


if __name__ == "__main__":
    main()
