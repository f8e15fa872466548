"""Assigns the rows of a step's batch to mini-batches, in the same way for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rlhf_api.spec.job_spec import Training
from rlhf_trainer.training.mesh import ModelMesh
from rlhf_trainer.types import Batch


def mini_batches(
    trained: Tensor, batch: Batch, training: Training, mesh: ModelMesh, *, size: int | None
) -> Iterator[Tensor]:
    """The mini-batches of all epochs of a step, each as a mask of this rank's rows: bool [B].

    trained: bool [B], the rows to learn from; the others are in no mini-batch. size: the most rows of a mini-batch on
    all ranks together; None: all rows. No mini-batch is empty on all ranks.
    """
    everywhere = mesh.rows_of_all(trained.float(), batch.start)
    positions = (everywhere.cumsum(0).long() - 1).clamp(min=0)[batch.start : batch.start + batch.size]
    total = int(everywhere.sum())
    count = -(-total // (size or max(total, 1)))
    for epoch in range(training.update_epochs):
        assigned = assign_mini_batches(positions, count=max(count, 1), seed=training.seed, step=batch.step, epoch=epoch)
        yield from (trained & (assigned == number) for number in range(count))


def assign_mini_batches(rows: Tensor, *, count: int, seed: int, step: int, epoch: int) -> Tensor:
    """The mini-batch, 0 .. count - 1, of each row: int64 [B].

    rows: int64 [B], positions among the rows to learn from. Of each `count` neighbouring rows one goes to each
    mini-batch, by a random permutation. So ranks, which hold neighbouring rows, get about the same number of rows of
    each mini-batch, and which rows are in a mini-batch depends on (seed, step, epoch) only.
    """
    blocks = {block: _permutation(count, seed, step, epoch, block) for block in set((rows // count).tolist())}
    return torch.tensor([int(blocks[row // count][row % count]) for row in rows.tolist()], dtype=torch.int64)


def _permutation(count: int, *key: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(key).permutation(count))
