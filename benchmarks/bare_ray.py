"""A step's calls without our controller: what Ray itself costs the process that makes them (benchmarks/controller.py).

The step is written down as calls, results and references. Actors that have nothing of ours play it: calls only; with as
many results of the same shapes; with the references that ours are sent, as arguments; and with these inside a list.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import ray
import torch

CALLS, RESULTS, ARGUMENTS, NESTED = PARTS = ("calls", "+ results", "+ arguments", "nested instead")
"""How a step is played."""
Shapes = Sequence[Sequence[int]]
Result = tuple[int, int, int]
"""(number of the call, rank, number of the result)."""


@dataclass(frozen=True)
class PlainCall:
    """A call of a step on one rank: the tensors that it returns beside its report, and the earlier ones it is sent."""

    shapes: Shapes
    reads: Sequence[Result]


Script = Sequence[Sequence[PlainCall]]
"""[number of the call][rank], in the order in which they are made."""


class Plain:
    """An actor that returns zeros."""

    def __init__(self, shapes: Sequence[Shapes]) -> None:
        self._shapes = shapes

    def call(self, number: int, has_results: bool, *given: Any) -> Any:
        if given and isinstance(given[0], list):
            ray.get(given[0])
        pieces = [torch.zeros(*shape) for shape in self._shapes[number]] if has_results else []
        return (*pieces, None) if pieces else None


def play(actors: Sequence[Any], script: Script, part: str) -> None:
    """One step, until all its calls have ended."""
    results: dict[Result, ray.ObjectRef] = {}
    reports = []
    for number, calls in enumerate(script):
        for rank, (actor, call) in enumerate(zip(actors, calls, strict=True)):
            has_results = part != CALLS and bool(call.shapes)
            references = [results[each] for each in call.reads] if part in (ARGUMENTS, NESTED) else []
            given = [references] if part == NESTED else references
            method = actor.call.options(num_returns=len(call.shapes) + 1 if has_results else 1)
            sent = method.remote(number, has_results, *given)
            made = sent if has_results else [sent]
            reports.append(made[-1])
            results.update({(number, rank, index): one for index, one in enumerate(made[:-1])})
    ray.get(reports)


def cpu_of(script: Script, *, warm_up: int, steps: int) -> Mapping[str, float]:
    """CPU seconds of this process, in all its threads, for a step of each kind; Ray is running."""
    process = ray.remote(num_cpus=1)(Plain)
    actors = [process.remote([call.shapes for call in mine]) for mine in zip(*script, strict=True)]
    found = {}
    for part in PARTS:
        samples = []
        for _ in range(warm_up + steps):
            began = time.process_time()
            play(actors, script, part)
            samples.append(time.process_time() - began)
        found[part] = median(samples[warm_up:])
    for actor in actors:
        ray.kill(actor)
    return found
