"""What a generator holds of its device."""

from __future__ import annotations

from typing import Literal

import torch

Part = Literal["weights", "kv_cache"]
"""What sleeps and wakes by itself, by vLLM's names."""


def bytes_used(device: torch.device) -> int:
    """Bytes of a GPU that are in use, without what torch only keeps for reuse; 0 on CPU, where each part is counted."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
