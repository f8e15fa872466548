"""A manifest that is no YAML, or holds no jobs, is reported with its line or its document."""

from itertools import pairwise
from pathlib import Path

import pytest

from rlhf_api.files import load
from rlhf_api.problems import SpecError
from tests.each import each_case

# sentence -> manifest, expected text of the error
FILES = {
    "a document that is a list": ("- 1\n", "document 1: is not a mapping"),
    "no document": ("---\n---\n", "the text: holds no RLHFJob, it is empty"),
    "a key that is given twice": (
        "kind: RLHFJob\nspec: {}\nkind: RLHFJob\n",
        'line 3: cannot be read: "kind" is given twice, first on line 1',
    ),
    "a bracket that is not closed": (
        "a: 1\nb: [1\n",
        "line 3: cannot be read: expected ',' or ']', but got '<stream end>'",
    ),
    "a key inside a value": ("a: b: c\n", "line 1: cannot be read: mapping values are not allowed here"),
    "an unprintable character": ("a: 1\nb: \x01\n", "line 2: cannot be read: a character is not printable"),
    "a number of too many digits": ("a: 1\nb: " + "1" * 5000, "line 2: cannot be read: this cannot be read as int"),
    "a tag on what it does not fit": ("a: !!float x\n", "line 1: cannot be read: this cannot be read as float"),
    "a list that is said to be a mapping": ("a: !!map [1]\n", "line 1: cannot be read: this is no mapping"),
    "a type that JSON has not": (
        "a: !!timestamp x\n",
        "line 1: cannot be read: could not determine a constructor for the tag 'tag:yaml.org,2002:timestamp'",
    ),
    "an alias within itself": ("a: &a [*a]\n", "document 1: its aliases stand for more than 100,000 values"),
    "aliases of aliases": (
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdefgh")),
        "document 1: its aliases stand for more than 100,000 values",
    ),
    "brackets without end": ("[" * 5000, "the text: is nested too deeply"),
    "a Python object": (
        "a: !!python/object:os.system {}\n",
        (
            "line 1: cannot be read: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object:os.system'"
        ),
    ),
}


@each_case(("text", "expected"), FILES.values(), ids=FILES)
def test_a_file_that_cannot_be_read_says_where(text: str, expected: str) -> None:
    with pytest.raises(SpecError) as raised:
        load(text)
    assert str(raised.value) == expected


def test_a_name_of_several_lines_is_told_on_one() -> None:
    with pytest.raises(SpecError) as raised:
        load('kind: RLHFJob\nmetadata: {name: job}\n"a\\nb\\u001b": 1\n')
    assert "job: a b : unknown field; expected apiVersion, kind, metadata or spec" in str(raised.value).split("\n")


def test_a_document_without_a_name_goes_by_its_number(chain: str) -> None:
    with pytest.raises(SpecError) as raised:
        load(chain, ["helpful-sft:metadata={}"])
    assert str(raised.value) == "document 2: metadata.name: is missing"


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xff")
    missing = tmp_path / "missing.yaml"
    for path, message in {binary: "it is not UTF-8 text", missing: "No such file or directory"}.items():
        with pytest.raises(SpecError) as raised:
            load(path)
        assert str(raised.value) == f"{path}: cannot be read: {message}"
