"""One rank of a world of many: torch's fake process group and a fake GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from rlhf_trainer.stored_tensors import LocalFile
from rlhf_trainer.training import distributed, experts, optimizer, sharding
from tests.real_size.fake_gpu import fake_gpu
from tests.real_size.live_bytes import GPU, HOST, LiveBytes
from tests.real_size.shapes import GPU_BYTES

FAKE = dist.Backend.FAKE
READ = LocalFile.read

if GPU not in dist.Backend.backend_capability[FAKE]:
    dist.Backend.backend_capability[FAKE].append(GPU)


@contextmanager
def rank_of_world(ranks: int, live: LiveBytes, *, rank: int = 0) -> Iterator[None]:
    """The block is one of `ranks` ranks, each with a fake GPU; other ranks are imagined."""
    real = distributed.device_here.__code__
    dist.init_process_group(f"cpu:{FAKE},{GPU}:{FAKE}", store=FakeStore(), rank=rank, world_size=ranks)
    distributed.device_here.__code__ = (lambda: torch.device("gpu", 0)).__code__  # it is imported by name
    threads = torch.autograd.is_multithreading_enabled()
    try:
        with (
            fake_gpu(live),
            patch.object(sharding, "fully_shard", _sharded),
            patch.object(optimizer, "device_memory", lambda: GPU_BYTES),
            patch.object(LocalFile, "read", _read),
            patch.object(experts, "tokens_by_expert", _balanced),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield
    finally:
        torch.autograd.set_multithreading_enabled(threads)
        distributed.device_here.__code__ = real
        dist.destroy_process_group()


def _balanced(chosen: Tensor, experts: int) -> Tensor:
    """Return equal numbers of tokens for all experts, as fake tensors do not say what a router chooses."""
    each, rest = divmod(chosen.numel(), experts)
    return torch.tensor([each + (number < rest) for number in range(experts)], device=chosen.device)


def _read(file: LocalFile, name: str, index: tuple[slice, ...]) -> Tensor:
    """The product's reading, uncounted: a file is mapped into memory, not held."""
    with _disable_current_modes():
        return READ(file, name, index)


def _sharded(module: nn.Module, **options: Any) -> Any:
    """FSDP2, after norms and buffers have moved: they are real, and their data cannot become a fake tensor's."""
    for each in module.modules():
        for name, weight in each._parameters.items():
            if weight is not None and weight.device.type == HOST and not isinstance(weight, DTensor):
                each._parameters[name] = nn.Parameter(weight.detach().to(GPU), weight.requires_grad)
        for name, buffer in each._buffers.items():
            each._buffers[name] = None if buffer is None else buffer.to(GPU)
    return fully_shard(module, **options)
