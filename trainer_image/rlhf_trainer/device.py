"""Device of this process: the GPUs that torch sees, their memory and peak FLOP/s; on CPU the container's memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mapper.hardware import FoundGpu, figures_of

if TYPE_CHECKING:  # `rlhf plan` starts without torch
    import torch

CONTAINER = Path("/sys/fs/cgroup")
"""Folder of the container's memory statistics (cgroup v2)."""


def gpus_here() -> list[FoundGpu]:
    """Return each GPU that torch sees; an empty list without torch."""
    try:
        import torch
    except ImportError:
        return []
    return [_found(torch.cuda.get_device_properties(place)) for place in range(torch.cuda.device_count())]


def peak_flops(dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of this rank's GPU by the mapper's table; 0 on CPU, and for a GPU that the table lacks."""
    found = gpus_here()
    gpu = figures_of(found[0]) if found else None
    if gpu is None:
        return 0.0
    return gpu.fp32 if dtype.itemsize > 2 else gpu.bf16


def memory_in_use() -> tuple[int, int]:
    """Return (bytes in use, bytes in total) of this rank's GPU, as its driver counts them.

    On CPU: the container's memory without its file cache; without a limit, this process's memory and the machine's.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        return total - free, total
    try:
        limit = int((CONTAINER / "memory.max").read_text())
        cached = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())["inactive_file"]
        return max(0, int((CONTAINER / "memory.current").read_text()) - int(cached)), limit
    except (OSError, ValueError):  # no cgroup v2, or no limit (`max`)
        # statm: total and resident size in pages, ...
        page, resident = os.sysconf("SC_PAGE_SIZE"), int(Path("/proc/self/statm").read_text().split()[1])
        return page * resident, page * os.sysconf("SC_PHYS_PAGES")


def _found(properties: Any) -> FoundGpu:
    """Return a GPU's figures from torch's properties: clocks in kHz, and memory that moves data twice a cycle."""
    import torch

    return FoundGpu(
        name=properties.name,
        memory=float(properties.total_memory),
        capability=(0, 0) if torch.version.hip else (properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        clock=properties.clock_rate * 1e3,
        memory_bandwidth=2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8,
    )
