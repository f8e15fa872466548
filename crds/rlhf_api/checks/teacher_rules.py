"""Rules for algorithms that learn from a teacher, and for jobs whose responses get no reward."""

from collections.abc import Iterator

from rlhf_api.checks.code_rules import ENVIRONMENT, SAMPLES
from rlhf_api.checks.rule import Rule, algorithm
from rlhf_api.expressions import Field
from rlhf_api.problems import choice
from rlhf_api.spec.algorithms import Distilling

OVER_VOCABULARY = ("Forward", "Reverse", "JensenShannon")
"""Divergences that compare whole distributions, not only the sampled token."""


def distillation() -> Iterator[Rule]:
    """Yield the rules for options of a divergence, and for what needs a reward in a job that may lack one."""
    for option, kinds in (("topK", OVER_VOCABULARY), ("teacherShare", OVER_VOCABULARY[2:])):
        given, divergence = Field(f"algorithm.{option}").is_given, Field("algorithm.divergence").or_else("Sampled")
        yield Rule(f"algorithm.{option}", given.implies(divergence.one_of(kinds)), f"is for divergence {choice(kinds)}")
    has_reward = Field("models.reward").is_given | ENVIRONMENT
    distils = algorithm(lambda each: issubclass(each, Distilling))
    message = "is {value}, but {name} compares the rewards of a prompt's responses; expected at least 2"
    yield Rule("rollout.samplesPerPrompt", (distils & has_reward).implies(SAMPLES >= 2), message)
    needs_judge = distils & ~has_reward
    has_judge = (Field("evaluation.functions").size() > 0) | (Field("evaluation.verifiers").size() > 0)
    judged = (needs_judge & Field("evaluation").is_given).implies(has_judge)
    yield Rule("evaluation", judged, "has no functions and no verifiers, and without models.reward nothing else judges")
    message = "is {value}, but without models.reward the kept responses have no reward"
    yield Rule("rollout.keep", needs_judge.implies(Field("rollout.keep") == 0.0), message)
