"""Rules for algorithms that learn from a teacher, and for jobs whose responses get no reward."""

from collections.abc import Iterator

from rlhf_api.checks.code_rules import ENVIRONMENT, SAMPLES
from rlhf_api.checks.rule import Rule, algorithm
from rlhf_api.expressions import Expression, Field
from rlhf_api.problems import choice
from rlhf_api.spec.algorithms import Distilling

ON_SERVERS = Field("models.teacherEndpoints").size() > 0
OVER_VOCABULARY = ("Forward", "Reverse", "JensenShannon")
"""Divergences that compare whole distributions, not only the sampled token."""


def distillation() -> Iterator[Rule]:
    """Yield the rules for options of a divergence, teachers, and what needs a reward in a job that may lack one."""
    divergence = Field("algorithm.divergence").or_else("Sampled")
    for option, kinds in (("topK", OVER_VOCABULARY), ("teacherShare", OVER_VOCABULARY[2:])):
        given = Field(f"algorithm.{option}").is_given
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
    yield from _servers(distils, divergence)


def _servers(distils: Expression, divergence: Expression) -> Iterator[Rule]:
    path, key, temperature = "models.teacherEndpoints", Field("algorithm.teacherKey"), Field("rollout.temperature")
    yield Rule(path, ON_SERVERS.implies(distils), "{name} has no teacher on servers")
    yield Rule("algorithm.teacherKey", key.is_given.implies(ON_SERVERS), f"is {{value}}, but {path} is missing")
    alone = (Field(path).size() == 1) & ~Field("models.teacher").is_given
    several = (distils & ON_SERVERS & ~key.is_given).implies(alone)
    yield Rule("algorithm.teacherKey", several, "is missing, which names each row's teacher among several")
    cut = (ON_SERVERS & divergence.one_of(OVER_VOCABULARY)).implies(Field("algorithm.topK").is_given)
    yield Rule("algorithm.topK", cut, f"is missing, {path} gives only likeliest tokens")
    message = f"is {{value:g}}, but {path} gives probabilities at temperature 1"
    yield Rule("rollout.temperature", ON_SERVERS.implies(temperature == 1.0), message)
    lives = Field("placement.pools[].models").contains("teacher")
    given = Field("models.teacher").is_given | ~ON_SERVERS
    yield Rule("placement.pools[].models", lives.implies(given), "the teachers are on servers, not in pools")
