"""What belongs to an algorithm besides its file: an example, a row of the docs, generated files, a test by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import pytest
from pydantic import Field

from rlhf_api.contract import tag_of
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import Algorithm, PolicyGradient
from rlhf_mapper.workload import workload_of
from rlhf_trainer.algorithms.models import Tensor, sample_and_learn
from tests.each import each_case
from tests.examples.test_every_example_is_right import EXAMPLES, jobs_of
from tests.repo.tree import ROOT

GENERATED = ("crds/rlhfjobs.yaml", "helm/rlhf-operator/files/rlhfjobs.yaml", "docs/api-reference.md")


@dataclass(frozen=True)
class Repository:
    """Where the parts of an algorithm are looked for."""

    shown: frozenset[str]
    """Algorithms of the examples."""
    learning: frozenset[str]
    """Of those, the ones that have a model that the mapper sees updated."""
    docs: str
    generated: dict[str, str]
    tests: str


def repository() -> Repository:
    jobs = [job for path in EXAMPLES for job in jobs_of(path)]
    work = {job.spec.algorithm.name: workload_of(job).work.values() for job in jobs}
    return Repository(
        shown=frozenset(work),
        learning=frozenset(name for name, models in work.items() if any(each.updates for each in models)),
        docs=(ROOT / "docs/algorithms.md").read_text(),
        generated={path: (ROOT / path).read_text() for path in GENERATED},
        tests="\n".join(path.read_text() for path in sorted((ROOT / "tests/trainer").rglob("test_*.py"))),
    )


def forgotten(algorithm: type[Algorithm], there: Repository) -> list[str]:
    """What the repository lacks of an algorithm, a sentence each."""
    name, file = tag_of(algorithm), algorithm.__module__.rpartition(".")[2]
    row = rf"^\| {name} \| {re.escape(algorithm.paper)}.*`{file}\.py`"
    parts = {
        "an example in examples/": name in there.shown,
        "a workload in which a model is updated": name in there.learning or not algorithm.trained,
        "a row of docs/algorithms.md with its paper and its file": re.search(row, there.docs, re.MULTILINE),
        f"a test of its advantage, test_{file}_..._by_hand": not issubclass(algorithm, PolicyGradient)
        or re.search(rf"def test_{file}_(\w+_)?by_hand\b", there.tests),
        **{
            f"its name in {path} (make generate)": re.search(rf"\b{name}\b", there.generated[path])
            for path in GENERATED
        },
    }
    return [f"{name} lacks {part}" for part, found in parts.items() if not found]


class Planted(PolicyGradient):
    paper = "arXiv:2600.00001"
    step = staticmethod(sample_and_learn)
    name: Annotated[Literal["Planted"], Field(description="An algorithm of which all but the class was forgotten.")]

    def advantage(self, returns: Tensor) -> Tensor:
        return returns


@pytest.fixture(scope="module")
def there() -> Repository:
    return repository()


@each_case("name", ALGORITHMS)
def test_every_algorithm_has_all_its_parts(name: str, there: Repository) -> None:
    assert forgotten(ALGORITHMS[name], there) == []


def test_what_is_forgotten_is_named(there: Repository) -> None:
    file = Planted.__module__.rpartition(".")[2]
    assert forgotten(Planted, there) == [
        "Planted lacks an example in examples/",
        "Planted lacks a workload in which a model is updated",
        "Planted lacks a row of docs/algorithms.md with its paper and its file",
        f"Planted lacks a test of its advantage, test_{file}_..._by_hand",
        *(f"Planted lacks its name in {path} (make generate)" for path in GENERATED),
    ]


def test_each_part_is_missed_by_itself(there: Repository) -> None:
    rloo = ALGORITHMS["RLOO"]
    without = [
        replace(there, shown=frozenset()),
        replace(there, learning=frozenset()),
        replace(there, docs=there.docs.replace("| RLOO |", "")),
        replace(there, tests=there.tests.replace("test_rloo_by_hand", "")),
        *(replace(there, generated=there.generated | {path: ""}) for path in GENERATED),
    ]
    assert [len(forgotten(rloo, each)) for each in without] == [1] * len(without)
