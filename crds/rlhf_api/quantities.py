"""Numbers as Kubernetes writes them: 500m, 4, 16Gi."""

import math
import re
from fractions import Fraction
from functools import lru_cache

UNITS = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{unit: Fraction(1000**power) for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{unit: Fraction(1024**power) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
}
NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,3})?)([a-zA-Z]*)")


@lru_cache(maxsize=4096)
def amount(quantity: str) -> Fraction:
    """Return the number that a quantity stands for. Raises ValueError for other text."""
    number, unit = _parts(quantity)
    return number * UNITS[unit]


def times(quantity: str, factor: int) -> str:
    """Return a quantity multiplied by a factor, in the same unit."""
    number, unit = _parts(quantity)
    product = number * factor
    return f"{product}{unit}" if product.denominator == 1 else f"{float(product):g}{unit}"


def _parts(quantity: str) -> tuple[Fraction, str]:
    found = NUMBER.fullmatch(quantity)
    if not found or found[2] not in UNITS:
        raise ValueError(f"{quantity!r} is no quantity")
    return Fraction(found[1]), found[2]


def gibibytes(size: Fraction | float) -> str:
    """Return bytes as a quantity in Gi, rounded up."""
    return f"{math.ceil(size / 1024**3)}Gi"


def mebibytes(size: Fraction | int) -> str:
    """Return bytes as a quantity in Mi, rounded down; at least 1Mi."""
    return f"{max(1, math.floor(size / 1024**2))}Mi"
