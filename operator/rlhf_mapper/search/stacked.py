"""Many stage tables in a few arrays, with seconds as ranks, so that lookups of many boxes are single numpy calls."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhf_mapper.search.objective import Floats
from rlhf_mapper.search.tables import StageTable

Ints = NDArray[np.int64]


class StackedTables:
    """Stage tables in a row, each followed by an end mark; the last table, `nothing`, has no GPUs and no seconds.

    An option is a row of a table: a pool size. Options that do not fit or are worse in every way are left out. A rank
    is an index into the sorted seconds of a stage over all tables; equal seconds have the rank of the first.
    """

    def __init__(self, tables: Sequence[StageTable], budgets: Sequence[int]) -> None:
        """Stack tables; budgets: GPUs that each table may use."""
        kept = [_useful(table, budget) for table, budget in zip(tables, budgets, strict=True)]
        kept.append((np.zeros(1, np.int64), np.zeros((len(kept[0][1]), 1))))
        most = self.most_gpus = max(budgets)
        """Largest number of GPUs that any table may use; end marks have one more."""
        number = np.repeat(np.arange(len(kept)), [len(gpus) + 1 for gpus, _ in kept])
        gpus = self.gpus = np.concatenate([np.append(gpus, most + 1) for gpus, _ in kept])
        """[N] pool size in GPUs of each option of all tables."""
        seconds = np.concatenate([np.pad(seconds, ((0, 0), (0, 1)), constant_values=np.inf) for _, seconds in kept], 1)
        self.seconds = np.sort(seconds, 1)
        """[stages, N] seconds of each rank in each stage, ascending from 0."""
        width = self.seconds.shape[1]
        ranks = np.stack([np.searchsorted(value, stage) for value, stage in zip(self.seconds, seconds, strict=True)])
        ranks[:, gpus > most] = width
        # Running minimum within each table: the offset puts a later table below every earlier one.
        offset = number * (width + 1)
        lowered = np.minimum.accumulate(np.where(gpus > most, 0, ranks) - offset, axis=1)
        self.ranks = np.ascontiguousarray(ranks.T)
        """[N, stages] rank of each option's seconds in each stage; an end mark lies above all ranks."""
        self.by_gpus = number * (most + 2) + gpus
        """[N] ascending key of each option: number of its table, then GPUs."""
        self.by_rank = width - lowered
        """[stages, N] ascending key of each option: number of its table, then its `least_ranks` in reverse."""
        self.least_ranks = np.ascontiguousarray((lowered + offset).T)
        """Lowest rank in each stage among an option and its table's options of fewer GPUs: [N options, stages]."""

    def within(self, tables: Ints, gpus: Ints) -> Ints:
        """Return each table's lowest ranks, [..., stages], among options of at most `gpus` GPUs; one must exist."""
        last = np.searchsorted(self.by_gpus, tables * (self.most_gpus + 2) + np.minimum(gpus, self.most_gpus), "right")
        ranks: Ints = self.least_ranks[last - 1]
        return ranks

    def smallest(self, tables: Ints, ranks: Ints) -> Ints:
        """Return each table's option of fewest GPUs with ranks <= `ranks` [M, stages], or end mark: index [M, sets]."""
        width = self.seconds.shape[1] + 1
        option = np.zeros_like(tables)
        for stage in range(len(self.seconds)):
            key = (tables + 1) * width - 1 - ranks[:, None, stage]
            np.maximum(option, np.searchsorted(self.by_rank[stage], key), out=option)
        # No stage allows a smaller option. Where seconds do not fall with size, larger options may be needed.
        row, column = np.nonzero(((self.ranks[option] > ranks[:, None]).any(2)) & (self.gpus[option] <= self.most_gpus))
        while len(row):
            option[row, column] += 1
            tried = option[row, column]
            again = (self.ranks[tried] > ranks[row]).any(1) & (self.gpus[tried] <= self.most_gpus)
            row, column = row[again], column[again]
        return option

    def values(self, ranks: Ints) -> Floats:
        """Return the seconds at `ranks`, which are indices into a stage's sorted seconds; both are [M, stages]."""
        seconds: Floats = self.seconds[np.arange(len(self.seconds)), ranks]
        return seconds

    def highest(self, seconds: Floats) -> Ints:
        """Return the highest ranks whose seconds are at most `seconds`, both [M, stages]; -1 for negative seconds."""
        columns = [np.searchsorted(own, given, "right") - 1 for own, given in zip(self.seconds, seconds.T, strict=True)]
        return np.stack(columns, 1)


def _useful(table: StageTable, budget: int) -> tuple[Ints, Floats]:
    """Return (GPUs [K'], seconds [stages, K']) of a table's K' useful options: pool sizes that fit and help.

    Most options that an option of fewer GPUs equals or beats in every stage are left out. An option is compared with
    the option of fewer GPUs that is fastest in each stage, and in the sum of the stages.
    """
    fits = np.isfinite(table.seconds).all(0) & (table.gpus <= budget)
    gpus, seconds = table.gpus[fits], table.seconds[:, fits]
    keep = np.ones(len(gpus), bool)
    position = np.arange(len(gpus))
    for fast in (*seconds, seconds.sum(0)):
        improves = np.append(True, fast[1:] < np.minimum.accumulate(fast)[:-1])[: len(fast)]
        fastest = np.maximum.accumulate(np.where(improves, position, 0))
        keep[1:] &= (seconds[:, fastest[:-1]] > seconds[:, 1:]).any(0)
    return gpus[keep], seconds[:, keep]
