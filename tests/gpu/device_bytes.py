"""The phases of a step on a real device: their peaks as torch's allocator counts them, and their seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhf_trainer.training.distributed import device_here, local_shard
from rlhf_trainer.training.sharding import ShardedModel
from tests.real_size.live_bytes import LiveBytes, Phase

STD = 0.02


class DeviceBytes(LiveBytes):
    """Takes the place of what counts fake tensors; on CPU it counts no bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """A phase; of one that comes again the larger peak and the last seconds are kept."""
        phase = self.phases.setdefault(name, Phase())
        on_gpu = device_here().type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        yield
        if on_gpu:
            torch.cuda.synchronize()
            phase.peak = max(phase.peak, torch.cuda.max_memory_allocated())
            phase.after = torch.cuda.memory_allocated()
        self.seconds[name] = time.perf_counter() - began


@torch.no_grad()
def randomise(model: ShardedModel) -> None:
    """Random weights where the files have zeros; norms scale by 1."""
    for parameter in model.module.parameters():
        shard = local_shard(parameter)
        if parameter.ndim == 1:
            shard.fill_(1.0)
        else:
            shard.normal_(0.0, STD)
