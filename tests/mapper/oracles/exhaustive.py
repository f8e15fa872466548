"""Every placement, every assignment to node groups and every allocation: the oracle of the pruned search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf_mapper.search.objective import Floats, Objective, weight
from rlhf_mapper.search.tables import Costs, Found, Sets, assignments, placements

Key = tuple[float, float]


@dataclass(frozen=True)
class _Combinations:
    """All allocations of some sets that stay within the groups' GPUs."""

    sizes: NDArray[np.int64]
    """[M, sets]"""
    gpus: NDArray[np.int64]
    """[M, groups]"""
    stages: Floats
    """[M, 3], of the slowest set."""


def exhaustive(costs: Costs, models: Iterable[str], objective: Objective | None = None) -> list[Found]:
    """The best allocation of every placement that fits, best first.

    Ties: the objective's two numbers, then fewer sets, then the order of `placements`. Which of several equally good
    allocations of one placement is returned is determined, but not specified.
    """
    goal = objective or Objective()
    found: list[tuple[Key, Found]] = []
    for placement in placements(models):
        answers = [
            _best(costs, placement, groups, goal)
            for groups in map(tuple, assignments(len(placement), costs.hosts).tolist())
        ]
        fits = [answer for answer in answers if answer is not None]
        if fits:
            found.append(min(fits, key=lambda answer: answer[0]))
    return [answer for _, answer in sorted(found, key=lambda answer: answer[0])]


def _best(costs: Costs, placement: Sets, groups: tuple[int, ...], goal: Objective) -> tuple[Key, Found] | None:
    """With its key, or None where no allocation fits."""
    every = _combinations(costs, placement, groups, 4 if goal.streams or goal.works_ahead else 3)
    first, second = goal.keys(goal.step(every.stages), weight(every.gpus, goal.weights(len(costs.groups))))
    order = np.lexsort((second, first))
    if not len(order) or not np.isfinite(first[order[0]]):
        return None
    best = order[0]
    sets = tuple(zip(placement, groups, every.sizes[best].tolist(), strict=True))
    stages = every.stages[best]
    generation, preparation, training = goal.three(stages).tolist()
    answer = Found(sets, float(goal.step(stages)), (generation, preparation, training))
    return (float(first[best]), float(second[best])), answer


def _combinations(costs: Costs, placement: Sets, groups: tuple[int, ...], width: int) -> _Combinations:
    budgets = np.array(costs.groups, dtype=np.int64)
    every = _Combinations(np.zeros((1, 0), np.int64), np.zeros((1, len(budgets)), np.int64), np.zeros((1, width)))
    for models, group in zip(placement, groups, strict=True):
        table = costs.of(models, group)
        old, new = (axis.ravel() for axis in np.indices((len(every.gpus), len(table.gpus))))
        gpus = every.gpus[old]
        gpus[:, group] += table.gpus[new]
        stages = np.maximum(every.stages[old], table.seconds[:, new].T)
        fits = (gpus <= budgets).all(1) & np.isfinite(stages).all(1)
        sizes = np.concatenate([every.sizes[old], table.gpus[new, None]], 1)
        every = _Combinations(sizes[fits], gpus[fits], stages[fits])
    return every
