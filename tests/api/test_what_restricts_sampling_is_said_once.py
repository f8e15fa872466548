"""What restricts sampling is said by the field itself; rules, workers, vLLM and importers read it there."""

from typing import Annotated

import pytest
from pydantic import Field

from rlhf_api.checks.rules import _old_log_probs
from rlhf_api.job import Job
from rlhf_api.spec.rollout import RestrictsSampling, Rollout
from rlhf_importers.table import sampling_rows, table
from rlhf_trainer.generation.vllm_arguments import sampling_arguments
from tests.api.cases import made


class Later(Rollout):
    """A rollout with one field more, as a later version may have."""

    min_p: Annotated[
        float, Field(ge=0, le=1, description="Least share of the likeliest."), RestrictsSampling(0, "min_p")
    ] = 0


def test_the_neutral_values_are_the_defaults() -> None:
    assert Later().samples_everything
    assert set(Rollout.sampling_restrictions()) == {"top_p", "top_k", "min_response_tokens"}


@pytest.mark.parametrize("field", [{"top_p": 0.9}, {"top_k": 5}, {"min_response_tokens": 1}, {"min_p": 0.1}])
def test_each_restriction_is_seen(field: dict[str, float]) -> None:
    assert not Later.model_validate(field, by_name=True).samples_everything


def test_what_restricts_nothing_is_no_restriction() -> None:
    assert Later(temperature=0.5, samples_per_prompt=4, max_staleness=1).samples_everything


def test_a_new_restriction_is_in_the_log_probs_rule() -> None:
    spec = Job.parse(made("PPO", ("training.oldLogProbs=Generator",))).spec
    rule = [each for each in _old_log_probs(Later) if each.path == "training.oldLogProbs"][1]
    for rollout, expected in ((Later(), []), (Later(min_p=0.1), ["training.oldLogProbs"])):
        changed = spec.model_copy(update={"rollout": rollout})
        assert [problem.path for problem in rule.problems(changed)] == expected
    assert rule.message.endswith("only with topP 1, topK -1, minResponseTokens 0 and minP 0")


@pytest.mark.parametrize("greedy", [False, True])
def test_a_new_restriction_reaches_vllm(greedy: bool) -> None:
    rollout = Later(min_p=0.1, top_p=0.9, top_k=5, min_response_tokens=3)
    found = sampling_arguments(rollout, ends=[2], seed=1, max_tokens=8, greedy=greedy)
    expected = (1.0, -1, 0, 3) if greedy else (0.9, 5, 0.1, 3)
    assert (found["top_p"], found["top_k"], found["min_p"], found["min_tokens"]) == expected


def test_a_new_restriction_is_no_longer_lost_by_importers() -> None:
    keys = {"top_p": "", "min_p": "", "repetition_penalty": ""}
    now, later = (table(sampling_rows(keys, rollout)) for rollout in (Rollout, Later))
    assert now.rows["top_p"] == later.rows["top_p"] == ("to", "rollout.topP")
    assert now.rows["min_p"] == ("lost", "sampling has temperature, topP and topK")
    assert later.rows["min_p"] == ("to", "rollout.minP")
    assert later.rows["repetition_penalty"] == ("lost", "sampling has temperature, topP, topK and minP")
