"""Estimate of pass@k, the chance that one of k responses passes (Chen et al., arXiv:2107.03374, section 2.1)."""

import math


def pass_at(size: int, *, samples: int, passed: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k): the chance that one of k = `size` passes, with n `samples` and c `passed`."""
    return 1 - math.comb(samples - passed, size) / math.comb(samples, size)
