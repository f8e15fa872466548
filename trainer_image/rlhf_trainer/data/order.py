"""Order of examples: permutations of each source, seeded or the user's own, and several sources in shares.

The order is a pure function of seed and position, so a resumed run gets the same rows as an uninterrupted one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Examples = npt.NDArray[np.int64]
MAX_SOURCES = 64
"""Most sources of a mix (`rlhf_api.spec.data.DataMix`)."""


@dataclass(frozen=True)
class Order:
    """Order of the examples of all data sets (sources); example numbers run through all sources, one by one."""

    counts: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int | None
    """Seed of the permutations; None: every epoch has the order of the files."""
    own: Callable[[int, int], Examples] | None = None
    """User's own order instead of permutations: (source, epoch) -> order of the source's examples; a pure function."""

    def at(self, positions: Examples) -> Examples:
        """Return the examples at positions (from 0) of the order, consecutive or not: int64 [B] -> int64 [B]."""
        found = np.empty_like(positions)
        sources, turns = shares(positions, self.weights)
        firsts = np.cumsum([0, *self.counts])
        for source, count in enumerate(self.counts):
            here = sources == source
            found[here] = firsts[source] + self._of_source(source, count, turns[here])
        return found

    def _of_source(self, source: int, count: int, positions: Examples) -> Examples:
        """Return the examples of a source at positions in its sequence of epochs."""
        epochs, within = np.divmod(positions, count)
        found = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            order = self.own(source, epoch) if self.own else permutation(count, self.seed, epoch, source)
            found[here] = order[within[here]]
        return found


def shares(positions: Examples, weights: Sequence[float]) -> tuple[Examples, Examples]:
    """Return for each position (index of its source, number of this source's rows before it), int64 [B] each.

    Row k of a source with share w has its place at (k + 1/2) / w; the rows of all sources are sorted by place. So
    the first n rows hold n x share rows of each source, within the number of sources.
    """
    share = np.asarray(weights, dtype=np.float64) / sum(weights)
    first, last = int(positions.min()), int(positions.max())
    before = max(0, first - len(share) - 1)  # all rows with places up to here have lower positions
    skipped = np.maximum(0, np.floor(before * share - 0.5)).astype(np.int64)
    ends = np.ceil((last + len(share) + 2) * share + 0.5).astype(np.int64)
    turns = [np.arange(start, end) for start, end in zip(skipped, ends, strict=True)]
    sources = np.repeat(np.arange(len(share)), [len(each) for each in turns])
    turn = np.concatenate(turns)
    order = np.lexsort((sources, (turn + 0.5) / share[sources]))
    chosen = order[positions - int(skipped.sum())]
    return sources[chosen], turn[chosen]


@lru_cache(maxsize=MAX_SOURCES)
def permutation(num_examples: int, seed: int | None, epoch: int, source: int) -> Examples:
    """Return the order of an epoch (from 0) of a source: every example once, int64 [num_examples], read-only."""
    order = np.arange(num_examples, dtype=np.int64)
    if seed is not None:
        numbers = [seed, epoch, source] if source else [seed, epoch]
        order = np.random.default_rng(numbers).permutation(order)
    order.setflags(write=False)
    return order
