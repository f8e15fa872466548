"""Quantities of Kubernetes are read exactly."""

from fractions import Fraction

import pytest

from rlhf_api.quantities import amount, mebibytes, times
from tests.each import each_case


@each_case(
    ("quantity", "expected"),
    [
        ("4", 4),
        ("500m", Fraction(1, 2)),
        ("1.5Gi", 3 * 2**29),
        ("2M", 2_000_000),
        ("1e3", 1000),
        ("12E", 12 * 10**18),
        ("3Ei", 3 * 2**60),
    ],
)
def test_a_quantity_stands_for_a_number(quantity: str, expected: Fraction | int) -> None:
    assert amount(quantity) == expected


@each_case("text", ["", "Gi", "4 Gi", "4gi", "-1", "0x1", "1e9999"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        amount(text)


def test_a_product_keeps_the_unit() -> None:
    assert (times("1500m", 2), times("1.5Gi", 2), times("0.3Gi", 3)) == ("3000m", "3Gi", "0.9Gi")
    with pytest.raises(ValueError, match="is no quantity"):
        times("4x", 2)


def test_bytes_are_written_in_mebibytes() -> None:
    assert (mebibytes(2**30), mebibytes(2**20 + 1), mebibytes(5)) == ("1024Mi", "1Mi", "1Mi")
