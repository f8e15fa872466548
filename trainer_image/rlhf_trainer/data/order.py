"""Which rows of a data set a step takes: a pure function of seed and step, so it is the same for any resume and ranks.

Epochs are seeded permutations, one after the other; step s (from 1) of batch size B takes positions (s - 1) * B to
s * B - 1:

    epoch 0        epoch 1        epoch 2
    2 0 3 1 4      1 4 2 0 3      ...
    |step 1| |step 2| |step 3| ...            with B = 4
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Examples = npt.NDArray[np.int64]


@lru_cache(maxsize=8)
def permutation(num_examples: int, *, seed: int, epoch: int) -> Examples:
    """The order of an epoch (from 0): every example once, int64 [num_examples]. Not to be written to."""
    order = np.random.default_rng([seed, epoch]).permutation(num_examples).astype(np.int64)
    order.setflags(write=False)
    return order


def examples_at(positions: Examples, *, num_examples: int, seed: int) -> Examples:
    """The examples at these positions of the concatenated epochs: int64 [B] -> int64 [B]."""
    epochs, within = np.divmod(positions, num_examples)
    found = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        found[here] = permutation(num_examples, seed=seed, epoch=epoch)[within[here]]
    return found
