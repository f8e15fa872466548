"""Deals the rows of a step's batch into mini-batches, the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rlhf_api.spec import Training
from rlhf_trainer.training.mesh import ModelMesh
from rlhf_trainer.types import Batch


def mini_batches(
    trained: Tensor, batch: Batch, training: Training, mesh: ModelMesh, *, size: int | None
) -> Iterator[Tensor]:
    """The mini-batches of all epochs of a step: bool [B], which of this rank's rows are in each.

    trained: bool [B], the rows to learn from; the others are in none. size: rows of a mini-batch on all ranks together,
    at most; None: all. No mini-batch is empty on all ranks.
    """
    everywhere = mesh.rows_of_all(trained.float(), batch.start)
    places = (everywhere.cumsum(0).long() - 1)[batch.start : batch.start + batch.size]
    total = int(everywhere.sum())
    count = -(-total // (size or max(total, 1)))
    for epoch in range(training.update_epochs):
        dealt = deal(places, count=max(count, 1), seed=training.seed, step=batch.step, epoch=epoch)
        yield from (trained & (dealt == number) for number in range(count))


def deal(rows: Tensor, *, count: int, seed: int, step: int, epoch: int) -> Tensor:
    """Number of the mini-batch, 0 .. count - 1, of each row (int64 [B]).

    rows: int64 [B], place among the rows to learn from. Each block of `count` neighbouring rows gives one to each
    mini-batch, by a permutation of its own; so every mini-batch is spread evenly over contiguous shards of the batch,
    and which rows are in it depends on (seed, step, epoch) only.
    """
    blocks = {block: _permutation(count, seed, step, epoch, block) for block in set((rows // count).tolist())}
    return torch.tensor([int(blocks[row // count][row % count]) for row in rows.tolist()], dtype=torch.int64)


def _permutation(count: int, *key: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(key).permutation(count))
