"""Deals the rows of a step's batch into mini-batches, the same for any number of ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def deal(rows: Tensor, *, count: int, seed: int, step: int, epoch: int) -> Tensor:
    """Number of the mini-batch, 0 .. count - 1, of each row (int64 [B]).

    rows: int64 [B], row of the step's batch. Each block of `count` neighbouring rows gives one to each mini-batch, by
    a permutation of its own; so every mini-batch is spread evenly over contiguous shards of the batch, and which rows
    are in it depends on (seed, step, epoch) only.
    """
    first, last = int(rows.min()) // count, int(rows.max()) // count
    table = {block: _permutation(count, seed, step, epoch, block) for block in range(first, last + 1)}
    return torch.stack([table[row // count][row % count] for row in rows.tolist()])


def _permutation(count: int, *key: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(key).permutation(count))
