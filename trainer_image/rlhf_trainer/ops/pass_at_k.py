"""pass@k (Chen et al., arXiv:2107.03374, section 2.1)."""

import math


def pass_at(size: int, *, samples: int, passed: int) -> float:
    """The chance that one of `size` responses passes, of `samples` of which so many have: 1 - C(n - c, k) / C(n, k)."""
    return 1 - math.comb(samples - passed, size) / math.comb(samples, size)


def sizes_of(samples: int) -> list[int]:
    """k = 2, 4, ... up to `samples`, and that itself."""
    return sorted({*(2**power for power in range(1, samples.bit_length())), samples} - {1})
