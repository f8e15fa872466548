"""Each word of verl, OpenRLHF or TRL that is answered with "did you mean" leads to a field that exists."""

from rlhf_api.contract import fields_of
from rlhf_api.pydantic_errors import MEANT, Models, _models_in
from rlhf_api.spec.job_spec import JobSpec
from rlhf_api.spec.verifiers import Math
from tests.each import each_case


def exists(path: str) -> bool:
    models: Models = (JobSpec,)
    for part in path.replace("<role>", "actor").split("."):
        fields = [fields_of(model)[part] for model in models if part in fields_of(model)]
        if not fields:
            return False
        models = tuple(model for field in fields for model in _models_in(field.annotation))
    return True


@each_case("path", sorted(set(MEANT.values())))
def test_the_field_exists(path: str) -> None:
    assert exists(path)


def test_a_field_that_is_gone_is_found() -> None:
    assert not exists("rollout.samples")


@each_case("word", ["n", "temperature", "lr", "beta", "num_generations", "max_completion_length"])
def test_the_most_frequent_words_are_known(word: str) -> None:
    assert word in MEANT


def test_an_earlier_name_of_a_field_is_explained() -> None:
    assert Math.hints["extract"] == "write answerExtract for the column, and responseExtract for responses"
