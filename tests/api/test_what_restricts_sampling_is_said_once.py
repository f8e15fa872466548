"""What restricts sampling is said by the field itself; rules, workers, vLLM and importers read it there."""

from typing import Annotated

import pytest
from pydantic import Field

from rlhf_api.checks.log_prob_rules import log_probs
from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_api.spec.rollout import RestrictsSampling, Rollout
from rlhf_importers.table import parse
from rlhf_trainer.generation.vllm_arguments import sampling_arguments
from tests.api.cases import made
from tests.each import each_case


class Later(Rollout):
    """A rollout with one field more, as a later version may have."""

    top_a: Annotated[
        float, Field(ge=0, le=1, description="Least share of the likeliest, squared."), RestrictsSampling(0, "top_a")
    ] = 0


def test_the_neutral_values_are_the_defaults() -> None:
    assert Later().samples_everything
    assert set(Rollout.sampling_restrictions()) == {"top_p", "top_k", "min_p", "min_response_tokens"}


@each_case("field", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"min_response_tokens": 1}, {"top_a": 0.1}])
def test_each_restriction_is_seen(field: dict[str, float]) -> None:
    assert not Later.model_validate(field, by_name=True).samples_everything


def test_what_restricts_nothing_is_no_restriction() -> None:
    assert Later(temperature=0.5, samples_per_prompt=4, max_staleness=1).samples_everything


def test_a_new_restriction_is_in_the_log_probs_rule() -> None:
    spec = Job.parse(made("PPO", ("training.oldLogProbs=Generator",))).spec
    rule = [each for each in log_probs(Later) if each.path == "training.oldLogProbs"][1]
    for rollout, expected in ((Later(), []), (Later(top_a=0.1), ["training.oldLogProbs"])):
        changed = spec.model_copy(update={"rollout": rollout})
        assert [problem.path for problem in rule.problems(changed)] == expected
    assert rule.message.endswith("only with topP 1, topK -1, minP 0, minResponseTokens 0 and topA 0")


@pytest.mark.parametrize("greedy", [False, True])
def test_a_new_restriction_reaches_vllm(greedy: bool) -> None:
    rollout = Later(top_a=0.2, min_p=0.1, top_p=0.9, top_k=5, min_response_tokens=3)
    found = sampling_arguments(rollout, ends=[2], seed=1, max_tokens=8, greedy=greedy)
    expected = (1.0, -1, 0, 0, 3) if greedy else (0.9, 5, 0.1, 0.2, 3)
    assert tuple(found[name] for name in ("top_p", "top_k", "min_p", "top_a", "min_tokens")) == expected


def test_a_new_restriction_is_no_longer_lost_by_importers() -> None:
    keys = ("top_p", "min_p", "top_a", "repetition_penalty")
    text = "\n".join(f"{key}  sampling  {key}" for key in keys)
    now, later = (parse(text, "GRPO", {}, rollout) for rollout in (Rollout, Later))
    assert now.rows["top_p"] == later.rows["top_p"] == ("to", "rollout.topP")
    assert now.rows["min_p"] == later.rows["min_p"] == ("to", "rollout.minP")
    assert now.rows["top_a"] == ("lost", "sampling has temperature, topP, topK and minP")
    assert later.rows["top_a"] == ("to", "rollout.topA")
    assert later.rows["repetition_penalty"] == ("lost", "sampling has temperature, topP, topK, minP and topA")


@each_case("restriction", ["topP=0.9", "topK=5", "minP=0.1"])
@each_case(
    ("field", "switch"),
    [
        ("algorithm.rolloutCorrection", "algorithm.rolloutCorrection={mode: Mask, cap: 2.0}"),
        ("rollout.maxStaleness", "rollout.maxStaleness=1"),
    ],
)
def test_restricted_samples_are_not_weighed(restriction: str, field: str, switch: str) -> None:
    with pytest.raises(SpecError) as caught:
        Job.parse(made("GRPO", (switch, f"rollout.{restriction}")))
    (problem,) = [each for each in caught.value.problems if each.path.endswith(field)]
    assert problem.message.endswith("which are the model's only with topP 1, topK -1 and minP 0")
    Job.parse(made("GRPO", (f"rollout.{restriction}",)))


@each_case("shaping", ["normalization: Running", "clip: 5.0"])
@each_case(("algorithm", "is_refused"), [("PPO", True), ("GRPO", False)])
def test_turns_that_are_learned_from_are_not_shaped(shaping: str, algorithm: str, is_refused: bool) -> None:
    changes = (f"algorithm.rewards={{{shaping}}}", "rollout.environment={entrypoint: a.b:C}")
    try:
        Job.parse(made(algorithm, changes))
        found = []
    except SpecError as error:
        found = [problem for problem in error.problems if problem.path.endswith("algorithm.rewards")]
    assert bool(found) == is_refused
