"""Scalars mean what they mean to kubectl, and what is written is read back."""

import math

import pytest

from rlhf_api.kubectl_yaml import read, read_one, write
from rlhf_api.problems import SpecError
from tests.each import each_case

# sentence -> YAML, its value
SCALARS: dict[str, tuple[str, object]] = {
    "an exponent without a point": ("1e-6", 1e-6),
    "an exponent without a point or sign": ("1e5", 1e5),
    "a number that starts with a point": (".5", 0.5),
    "a number that ends with a point": ("1.", 1.0),
    "underscores": ("1_000", 1000),
    "hexadecimal": ("0x1F", 31),
    "octal with a zero": ("010", 8),
    "octal with an o": ("-0o10", -8),
    "binary": ("0b11", 3),
    "yes": ("yes", True),
    "on": ("On", True),
    "y": ("y", True),
    "no": ("NO", False),
    "off": ("off", False),
    "false": ("false", False),
    "quoted yes": ("'yes'", "yes"),
    "a date": ("2026-01-31", "2026-01-31"),
    "a time": ("2026-01-31T12:00:00Z", "2026-01-31T12:00:00Z"),
    "a sexagesimal": ("1:30", "1:30"),
    "tilde": ("~", None),
    "null": ("null", None),
    "None": ("None", "None"),
    "infinity": ("-.inf", -math.inf),
    "a version": ("1.2.3", "1.2.3"),
    "keys that are no text": ("{1: a, yes: b}", {"1": "a", "true": "b"}),
    "an anchor": ("{a: &x [1], b: *x}", {"a": [1], "b": [1]}),
    "a merge that is overridden": (
        "{a: &x {k: 1, l: 2}, b: {<<: *x, k: 3}}",
        {"a": {"k": 1, "l": 2}, "b": {"l": 2, "k": 3}},
    ),
}


@each_case(("text", "value"), SCALARS.values(), ids=SCALARS)
def test_a_scalar_has_its_value_and_type(text: str, value: object) -> None:
    [found] = read(text, "")
    assert found == value
    assert type(found) is type(value)


def test_not_a_number_is_a_number() -> None:
    assert math.isnan(read(".nan", "")[0])


@each_case("value", ["1e5", "y", "off", "0o7", "1_0", "null", "2026-01-31", "1:30", "<<", "", 1e-8, 1e5])
def test_what_is_written_is_read_back(value: object) -> None:
    assert read(write({"a": value}), "") == [{"a": value}]


def test_empty_documents_are_kept_apart() -> None:
    assert read("a: 1\n---\n---\nb: 2\n", "") == [{"a": 1}, None, {"b": 2}]


def test_one_document_may_stand_between_empty_ones() -> None:
    assert read_one("---\na: 1\n---\n", "") == {"a": 1}
    assert read_one("", "") is None
    with pytest.raises(SpecError, match="nodes: holds 2 YAML documents, expected one"):
        read_one("a: 1\n---\nb: 2\n", "nodes: ")
