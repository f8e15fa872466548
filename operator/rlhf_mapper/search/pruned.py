"""Algorithm 1 of HybridFlow without trying every allocation: branch and bound over limits of the stages' seconds.

A box is a typed placement (sets, and a node group for each) with a lower and an upper limit of the slowest set's
seconds in each stage. Upper limits give each set its smallest pool. The smallest pools leave each set at most the
rest of its group's GPUs, and so bound every stage from below. These bounds and the smallest pools bound the objective;
the smallest pools themselves are an allocation. Boxes are halved along the stage with the widest gap, best bound first,
until no bound beats the best allocation. If the limits of a box meet, its smallest pools are its best allocation, so
the answer is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from rlhf_mapper.search.objective import Floats, Objective, weight
from rlhf_mapper.search.stacked import Ints, StackedTables
from rlhf_mapper.search.tables import Costs, Found, Sets, assignments, placements

WAVE, WAVES = 1024, 8
"""Boxes processed at once: numpy calls on WAVE boxes cost little more than on a few. Of very many boxes a WAVES-th part
is processed at once, since the others are copied each time."""
SLACK = 1 + 1e-9
"""Factor that widens limits computed by subtraction or division, lest rounding excludes an equally good allocation."""


class _Problem:
    """Input of the search as arrays over T typed placements, in the order of `placements` and then of `assignments`."""

    def __init__(self, costs: Costs, placed: list[Sets], goal: Objective) -> None:
        """Make the tables of all sets in all node groups; placed: sets of models of each placement."""
        sets = list(dict.fromkeys(models for each in placed for models in each))
        index, count = {models: number for number, models in enumerate(sets)}, len(costs.groups)
        pools = list(product(sets, range(count)))
        self.stacked = StackedTables([costs.of(*pool) for pool in pools], [costs.groups[group] for _, group in pools])
        width = max(map(len, placed))
        choices = {size: assignments(size, costs.hosts) for size in {len(each) for each in placed}}
        lengths = [len(choices[len(each)]) for each in placed]
        self.placed = placed
        self.placement = np.repeat(np.arange(len(placed)), lengths)
        """[T] number of the placement to which each typed placement belongs."""
        self.tables = np.full((len(self.placement), width), len(pools), np.int64)
        """[T, S] number of each set's stage table in `stacked`; the table `nothing` beyond the placement's sets."""
        self.groups = np.zeros_like(self.tables)
        """[T, S] index of each set's node group; 0 beyond the placement's sets."""
        for each, end in zip(placed, np.cumsum(lengths).tolist(), strict=True):
            groups, numbers = choices[len(each)], np.array([index[models] for models in each])
            rows = np.s_[end - len(groups) : end, : len(each)]
            self.groups[rows], self.tables[rows] = groups, numbers * count + groups
        self.budgets = np.array(costs.groups, dtype=np.int64)
        """[G] number of GPUs in each node group."""
        self.weights = goal.weights(len(costs.groups))
        """[G] weight of one GPU of each node group in the objective (`Objective.weights`)."""


@dataclass(frozen=True)
class _Boxes:
    """Boxes that remain to be searched, M of them: typed placements with limits of the stages' seconds."""

    typed: Ints
    """[M] index of each box's typed placement."""
    low: Ints
    """[M, stages] lower limit of the slowest set's seconds in each stage, as an index into `StackedTables.seconds`."""
    high: Ints
    """[M, stages] upper limit of the slowest set's seconds in each stage, as an index into `StackedTables.seconds`."""
    first: Floats
    """[M] lower bound of the first number of `Objective.keys` in each box; `second` bounds the second number."""
    second: Floats

    def __getitem__(self, chosen: slice | NDArray[np.bool_] | Ints) -> _Boxes:
        return _Boxes(*(each[chosen] for each in vars(self).values()))

    def __add__(self, others: _Boxes) -> _Boxes:
        return _Boxes(*(np.concatenate([each, vars(others)[name]]) for name, each in vars(self).items()))


class _Best:
    """Best allocation of each of P placements so far; `first` and `second` are its numbers in `Objective.keys`, [P]."""

    def __init__(self, placements: int, keep: int) -> None:
        self.first = np.full(placements, np.inf)
        self.second = np.full(placements, np.inf)
        self.options: dict[int, tuple[int, Ints]] = {}
        """Best allocation by placement: (typed placement, [S] index of each set's pool size in the stacked tables)."""
        self._keep = keep

    def offer(self, placement: Ints, first: Floats, second: Floats, typed: Ints, options: Ints) -> None:
        """Record the best of M allocations for each placement if it is better than the placement's best so far."""
        better = np.nonzero(_less(first, second, self.first[placement], self.second[placement]))[0]
        order = better[np.lexsort((second[better], first[better], placement[better]))]
        starts = np.diff(placement[order], prepend=-1) > 0
        for row in order[starts]:
            index = int(placement[row])
            self.first[index], self.second[index] = first[row], second[row]
            self.options[index] = int(typed[row]), options[row].copy()

    def order(self) -> Ints:
        """Return the indices of the best placements, best first: at most `keep`, and only those with an allocation."""
        order: Ints = np.lexsort((self.second, self.first))[: self._keep]
        fits: Ints = order[np.isfinite(self.first[order])]
        return fits

    def limits(self) -> tuple[Floats, Floats]:
        """Return limits (first, second), [P] each: an allocation is kept only if its `Objective.keys` are less.

        P is the number of placements. The second numbers only decide between equal first numbers.
        """
        order = np.lexsort((self.second, self.first))
        if len(order) < self._keep:
            return self.first, self.second
        last = order[self._keep - 1]
        out = _less(self.first[last], self.second[last], self.first, self.second)
        first, second = np.where(out, self.first[last], self.first), np.where(out, self.second[last], self.second)
        # A placement that comes earlier wins a tie with the last one kept.
        second = np.where(out & (np.arange(len(out)) < last), np.nextafter(second, np.inf), second)
        return first, second


def pruned(costs: Costs, models: Iterable[str], keep: int = 4, objective: Objective | None = None) -> list[Found]:
    """Return the best `keep` placements, with the same `Objective.keys` as an exhaustive search finds."""
    goal, placed = objective or Objective(), placements(models)
    if not placed or not costs.groups:
        return []
    problem = _Problem(costs, placed, goal)
    best, count = _Best(len(placed), keep), len(problem.placement)
    low = np.zeros((count, len(problem.stacked.seconds)), np.int64)
    high = low + problem.stacked.seconds.shape[1] - 1
    boxes = _Boxes(np.arange(count), low, high, np.zeros(count), np.zeros(count))
    while count := len(boxes.typed):
        wave, rest, size = boxes, boxes[:0], max(WAVE, count // WAVES)
        if count > size:
            order = np.argpartition(boxes.first, size)
            wave, rest = boxes[order[:size]], boxes[order[size:]]
        boxes = _halved(problem, goal, best, wave) + rest
        boxes = boxes[_worthwhile(problem, best, boxes)]
    return [_found(problem, goal, *best.options[int(index)]) for index in best.order()]


def _halved(problem: _Problem, goal: Objective, best: _Best, boxes: _Boxes) -> _Boxes:
    """Bound boxes, offer their smallest pools, and return the halves of boxes that may hold better allocations."""
    stacked = problem.stacked
    options = stacked.smallest(problem.tables[boxes.typed], boxes.high)
    sizes, groups = stacked.gpus[options], problem.groups[boxes.typed]
    gpus = np.stack([(sizes * (groups == group)).sum(1) for group in range(len(problem.budgets))], 1)
    exist = np.all(sizes <= stacked.most_gpus, axis=1)
    fits = exist & np.all(gpus <= problem.budgets, axis=1)
    boxes, options, gpus = boxes[fits], options[fits], gpus[fits]
    placement, used = problem.placement[boxes.typed], weight(gpus, problem.weights)

    chosen = stacked.ranks[options].max(1)
    best.offer(placement, *goal.keys(goal.step(stacked.values(chosen)), used), boxes.typed, options)

    limit = best.limits()[0][placement]
    spare = goal.used_within(limit, goal.step(stacked.values(boxes.low))) * SLACK - used
    low = np.maximum(boxes.low, _lowest(problem, boxes.typed, options, gpus, spare))
    seconds = stacked.values(low)
    most = goal.seconds_within(limit, used)[:, None] * SLACK - goal.beside(seconds)
    high = np.minimum(boxes.high, stacked.highest(most))
    boxes = _Boxes(boxes.typed, low, high, *goal.keys(goal.step(seconds), used))
    worthwhile = _worthwhile(problem, best, boxes)
    return _split(stacked, boxes[worthwhile], chosen[worthwhile])


def _split(stacked: StackedTables, boxes: _Boxes, chosen: Ints) -> _Boxes:
    """Return both halves of each of M boxes; chosen: [M, stages] ranks of the slowest set with the smallest pools."""
    low, high = boxes.low.copy(), boxes.high.copy()
    start, end = stacked.values(low), np.minimum(chosen, high)
    stop = stacked.values(end)
    rows, stage = np.arange(len(low)), np.argmax(stop - start, 1)
    middle = np.maximum(np.minimum(stacked.highest((start + stop) / 2), end - 1), low)[rows, stage]
    low[rows, stage], high[rows, stage] = middle + 1, middle
    below = _Boxes(boxes.typed, boxes.low, high, boxes.first, boxes.second)
    return below + _Boxes(boxes.typed, low, boxes.high, boxes.first, boxes.second)


def _worthwhile(problem: _Problem, best: _Best, boxes: _Boxes) -> NDArray[np.bool_]:
    """Return [M] whether each box may contain an allocation that is better than the best so far."""
    first, second = best.limits()
    placement = problem.placement[boxes.typed]
    better = _less(boxes.first, boxes.second, first[placement], second[placement])
    return better & (boxes.low <= boxes.high).all(1)


def _lowest(problem: _Problem, typed: Ints, options: Ints, gpus: Ints, spare: Floats) -> Ints:
    """Return lower bounds of the slowest set's ranks, [M, stages]: each set alone gets GPUs of weight `spare`."""
    weights = np.broadcast_to(problem.weights, gpus.shape)
    affordable = np.divide(spare[:, None], weights, out=np.full(gpus.shape, np.inf), where=weights > 0)
    room = np.minimum(problem.budgets - gpus, np.maximum(affordable, 0)).astype(np.int64)
    sizes = problem.stacked.gpus[options] + np.take_along_axis(room, problem.groups[typed], 1)
    lowest: Ints = problem.stacked.within(problem.tables[typed], sizes).max(1)
    return lowest


def _less(first: Floats, second: Floats, than_first: Floats, than_second: Floats) -> NDArray[np.bool_]:
    less: NDArray[np.bool_] = (first < than_first) | ((first == than_first) & (second < than_second))
    return less


def _found(problem: _Problem, goal: Objective, typed: int, options: Ints) -> Found:
    sets, groups = problem.placed[int(problem.placement[typed])], problem.groups[typed].tolist()
    sizes = problem.stacked.gpus[options].tolist()
    stages = problem.stacked.values(problem.stacked.ranks[options].max(0)[None])
    generation, preparation, training = goal.three(stages)[0].tolist()
    pools = tuple(zip(sets, groups, sizes, strict=False))
    return Found(pools, float(goal.step(stages)[0]), (generation, preparation, training))
