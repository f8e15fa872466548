"""What counts as a score: it travels as float32, so it must be finite there."""

from __future__ import annotations

LARGEST = 3.4028234663852886e38
"""The largest finite float32."""
EXPECTED = "a finite number (float32)"
"""What a user is told about it."""


def is_score(value: float) -> bool:
    """Whether a number is finite as float32."""
    return abs(value) <= LARGEST
