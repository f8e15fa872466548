"""A checksum of a parameter that can be added up from its slices, on any ranks and in any order."""

import numpy as np
import torch
from torch import Tensor

BITS = {2: torch.int16, 4: torch.int32}
"""Size of a weight's element in bytes -> integer type of the same size, of the elements' bits."""


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of all elements' bit patterns as signed integers: int64, on the tensor's device, without a wait.

    Sums of disjoint slices add up to the sum of the whole tensor, modulo 2^64. tensor: float32, bfloat16 or float16.
    """
    bits = tensor.detach().view(BITS[tensor.itemsize])
    if bits.device.type == "cpu":  # numpy is faster, but `bits.numpy()` would forbid to resize the storage
        return torch.as_tensor(np.from_dlpack(bits).sum(dtype="int64"))
    return bits.sum(dtype=torch.int64)
