"""A checksum that can be taken of parts: of the boxes of a parameter, on whichever ranks and in whatever order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BITS = {2: torch.int16, 4: torch.int32}


def bit_sum(tensor: Tensor) -> int:
    """The bit patterns of all elements, read as signed integers, added up; the sums of boxes add up to the whole's.

    float32, bfloat16 or float16.
    """
    bits = tensor.detach().view(_BITS[tensor.element_size()])
    if bits.device.type == "cpu":  # numpy is faster; by `bits.numpy()` it would forbid the storage to be resized
        return int(np.from_dlpack(bits).sum(dtype="int64"))
    return int(bits.sum(dtype=torch.int64))
