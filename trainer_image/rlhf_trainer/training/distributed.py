"""Joins torch.distributed by torchrun's environment variables; this rank's shards, and a few collectives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import _dist2
from torch.distributed.tensor import DTensor

_timeout: timedelta | None = None
Device = Literal["CPU", "GPU"]


def start(device: Device, timeout_seconds: float) -> int:
    """Join the process group named by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; returns the rank.

    NCCL on GPUs, gloo on CPU. A collective that takes longer than `timeout_seconds` raises.
    """
    if device == "GPU":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group("nccl" if device == "GPU" else "gloo", timeout=timeout)
    global _timeout  # noqa: PLW0603 one value for the process, like torch's default group
    _timeout = timeout
    return dist.get_rank()


def join_group(
    address: str, port: int, rank: int, size: int, timeout_seconds: float
) -> tuple[dist.ProcessGroup, TCPStore]:
    """Join a group whose ranks are in several worlds, and its store. Rank 0 is on the machine and has the port.

    Torch's collectives take it as `group`, but do not know it by the ranks of any world.
    """
    timeout = timedelta(seconds=timeout_seconds)
    there = TCPStore(address, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    make = _dist2._BACKENDS[dist.get_backend()]  # noqa: SLF001 `new_group` would read torchrun's variables
    return make(there, rank, size, timeout, device_here()), there


def collective_timeout() -> timedelta | None:
    """How long a collective may take; None before `start`. Torch takes it as an argument of each new group."""
    return _timeout


def device_here() -> torch.device:
    """The device that this rank computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def device_memory() -> int:
    """Bytes of memory of this rank's device; on CPU this rank's share of the machine's, as if all ranks were there."""
    device = device_here()
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // dist.get_world_size()


@torch.no_grad()
def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, without gradient; the tensor itself if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_over_ranks(values: Sequence[float | Tensor], group: dist.ProcessGroup | None = None) -> list[float]:
    """Each value summed over the ranks, all of them or those of a group (float64, one collective)."""
    total = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device_here())
    dist.all_reduce(total, group=group)
    return [float(value) for value in total.tolist()]


def largest_over_ranks(value: int, group: dist.ProcessGroup | None = None) -> int:
    """The largest value of any rank."""
    largest = torch.tensor(value, device=device_here())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest.item())


def rows_of_all_ranks(values: Tensor, start: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """All ranks' rows put together, float64 [B]; `values` are this rank's, the first of which is row `start`."""
    total = int(sum_over_ranks([len(values)], group)[0])
    rows = torch.zeros(total, dtype=torch.float64, device=device_here())
    rows[start : start + len(values)] = values
    dist.all_reduce(rows, group=group)
    return rows.cpu()
