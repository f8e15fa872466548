"""Device memory of the generation engine: its parts, and the bytes in use."""

from __future__ import annotations

from typing import Literal

import torch

Part = Literal["weights", "kv_cache"]
"""Parts of the engine's memory that are freed and allocated separately, by vLLM's names."""


def bytes_used(device: torch.device) -> int:
    """Bytes of a GPU in use, without torch's unused cache; 0 on CPU, where the parts are counted one by one."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
