"""What `rlhf validate` says of the cases that tests/cluster feeds to a real API server."""

import pytest

from rlhf_api.checks.resume import changes
from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from tests.api.cases import ONLY_VALIDATE, RIGHT, UPDATES, WRONG, Case, Update, made
from tests.each import each_case


def resolved(base: str, overrides: tuple[str, ...]) -> dict[str, object]:
    """A case's document with its defaults."""
    return Job.parse(made(base, overrides)).model_dump(mode="json", by_alias=True)


@each_case("case", RIGHT.values(), ids=RIGHT)
def test_a_right_document_is_accepted(case: Case) -> None:
    Job.parse(case.document())


@each_case("case", [*WRONG.values(), *ONLY_VALIDATE.values()], ids=[*WRONG, *ONLY_VALIDATE])
def test_a_wrong_document_is_refused_at_its_field(case: Case) -> None:
    with pytest.raises(SpecError) as raised:
        Job.parse(case.document())
    assert case.path in [problem.path for problem in raised.value.problems]


@each_case("update", UPDATES.values(), ids=UPDATES)
def test_a_change_makes_another_experiment_or_not(update: Update) -> None:
    problems = changes(resolved(update.base, update.before), resolved(update.base, update.after))
    if not (update.path and update.on_a_laptop):
        assert problems == []
    else:
        assert problems
        assert all(problem.path.startswith(update.path) for problem in problems) or update.path == "spec.evaluation"


def test_there_are_enough_cases() -> None:
    assert len(RIGHT) + len(WRONG) + len(UPDATES) > 200
