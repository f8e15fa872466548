"""The measures that `make house` prints and `make lint` keeps find what they are about."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.each import each_case
from tests.repo.complexity import functions_of
from tests.repo.house import MAX_RETURNS, MAX_STAYS, lines_by_room, measures, seconds_of_tests
from tests.repo.tree import product_files
from tests.repo.walk import START, Module, product_modules, walk_from
from tests.repo.words import FRAGMENTS, LENGTHS, PRONOUNS, broken_rules, docstrings, is_good_subject, is_over

PLAIN = "Lock held while free capacity is read and the reservation is written."
COMPLEX = """
def ways(rows, limit):
    assert rows
    for row in rows:
        if row and limit or row > limit:
            return [each for each in row if each]
    return row if limit else None
"""
ENTRY = """
from house.folder import Folder, clear
def run(job, other):
    folder = Folder(job.name)
    clear(other)
    folder.begin()
    finish(folder)
def finish(of):
    of.begin()
"""
FOLDER = """
from house.paths import joined
class Folder:
    def __init__(self, name):
        self.path = joined(name)
    def begin(self):
        return joined(self.path)
def clear(what):
    raise AssertionError
"""
PATHS = "def joined(name): return name"


@each_case(
    ("text", "rules"),
    [
        (PLAIN, []),
        ("Of the call in its messages.", [FRAGMENTS]),
        ("Whether they are alike.", [FRAGMENTS]),
        ("Whether a job waits.", []),
        ("Return what it has of those that they gave.", [PRONOUNS]),
        (f"Return {'many ' * 30}words.", [LENGTHS]),
    ],
)
def test_a_docstring_is_judged_by_its_words(text: str, rules: list[str]) -> None:
    assert list(broken_rules(text)) == rules


def test_a_docstring_below_an_assignment_is_read() -> None:
    assert [text for _, text in docstrings('"""One."""\nA = 1\n"""Two."""\ndef f():\n    "Three."')] == [
        "One.",
        "Two.",
        "Three.",
    ]


@each_case(
    ("subject", "is_good"),
    [
        ("mapper: read kernel tables", True),
        ("docs: `rlhf plan` explains its answer", True),
        ("mapper: reads", True),
        ("Lines as the formatter has them", False),
        ("mapper: the tables of kernels", False),
        ("mapper: added tables", False),
        (f"mapper: read {'x' * 72}", False),
    ],
)
def test_a_subject_names_its_part_and_begins_with_a_verb(subject: str, is_good: bool) -> None:
    assert is_good_subject(subject) is is_good


def test_one_fragment_in_a_hundred_is_allowed_and_no_chain() -> None:
    assert not is_over(Counter({FRAGMENTS: 1}), 100)
    assert is_over(Counter({FRAGMENTS: 2}), 100)
    assert is_over(Counter({PRONOUNS: 1}), 100)


def test_complexity_counts_every_way() -> None:
    # 1, the assertion, the loop, the condition with its `and` and `or`, the comprehension with its `if`, the last line
    assert list(functions_of(COMPLEX)) == [("ways", 2, 1 + 1 + 1 + 3 + 2 + 1)]


def test_a_walk_follows_the_parameter_through_objects() -> None:
    sources = {"house.entry": ENTRY, "house.folder": FOLDER, "house.paths": PATHS}
    modules = {name: Module(name, ast.parse(source)) for name, source in sources.items()}
    walk = walk_from(modules, "house.entry", "run", "job")
    # run; Folder(), joined; folder.begin, joined again; finish; `clear` gets something else
    assert walk.stays == ["house.entry", "house.folder", "house.paths", "house.folder", "house.paths", "house.entry"]
    assert (walk.rooms, walk.returns) == (3, 3)


def test_the_way_of_a_job_stays_short() -> None:
    walk = walk_from(product_modules(), *START)
    assert len(walk.stays) <= MAX_STAYS
    assert walk.returns <= MAX_RETURNS


def test_the_last_seconds_of_a_target_count(tmp_path: Path) -> None:
    (tmp_path / "seconds").write_text("make test 900\nmake test-unit 80\nmake test 850\n")
    assert seconds_of_tests(tmp_path / "seconds") == {"make test": 850, "make test-unit": 80}


@pytest.mark.slow
def test_every_measure_of_this_house_is_printed() -> None:
    found = {name: value for name, value, _ in measures()}
    assert len(found) >= 12
    assert found["docstrings"] > 1000
    assert 0 < found["product lines"] == lines_by_room().total()
    assert found["product lines"] < sum(path.read_text().count("\n") for path in product_files())
