"""A checksum of a parameter that can be added up from its slices, on any ranks and in any order."""

import numpy as np
import torch
from torch import Tensor

BITS = {2: torch.int16, 4: torch.int32}
"""Bytes of a weight's element -> integer type of the same size, as which the element's bits are read."""


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of all elements' bits as signed integers: int64, on the tensor's device, without waiting for it.

    Sums of disjoint slices add up to the sum of the whole tensor, modulo 2^64. tensor: float32, bfloat16 or float16.
    """
    bits = tensor.detach().view(BITS[tensor.itemsize])
    if bits.device.type == "cpu":  # numpy is faster, but after `bits.numpy()` the storage cannot be resized
        return torch.as_tensor(np.from_dlpack(bits).sum(dtype="int64"))
    return bits.sum(dtype=torch.int64)
