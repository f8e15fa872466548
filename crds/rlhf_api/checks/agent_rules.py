"""Rules for episodes of an agent (`rollout.agent`), whose tokens are a tree."""

from collections.abc import Iterator
from inspect import signature

from rlhf_api.checks.code_rules import AGENT, ENVIRONMENT, TOOLS
from rlhf_api.checks.rule import Rule, algorithm
from rlhf_api.expressions import Field
from rlhf_api.problems import choice
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import Algorithm, PolicyGradient

MAKES_DATA = algorithm(lambda each: each.makes == "data")
MODELS_OF_SUM = Field("models.reward.sum").where(Field("reward.uri", "one").is_given)
REWARD_MODEL = Field("models.reward.uri").is_given | (MODELS_OF_SUM.size() > 0)


READERS = {"critic", "cost", "teacher"}
"""Models that read a row as one text."""


def agents() -> Iterator[Rule]:
    """Yield the rules for an agent's program, and for the algorithms and rewards that can use its episodes."""
    path, command = "rollout.agent", Field("rollout.agent.command").is_given
    one = Field("rollout.agent.entrypoint").is_given != command
    yield Rule(path, AGENT.implies(one), "expected exactly one of entrypoint and command")
    only = "set only one of rollout.agent, rollout.environment and rollout.tools"
    yield Rule(path, AGENT.implies(~ENVIRONMENT & ~TOOLS), only)
    unused = ~Field("rollout.agent.arguments").is_given
    message = "is for an entrypoint; write a command's arguments into rollout.agent.command"
    yield Rule(f"{path}.arguments", command.implies(unused), message)
    message = "Replay is not possible: calls of rollout.agent do not keep the experts of tokens"
    yield Rule("rollout.routing", AGENT.implies(~(Field("rollout.routing") == "Replay")), message)
    for field in ("promptTemplate", "systemPrompt"):
        written = Field(f"data.{field}").is_given
        yield Rule(f"data.{field}", AGENT.implies(~written), "has no effect: rollout.agent writes the prompts")
    names = choice(name for name, each in ALGORITHMS.items() if _learns(each))
    message = f"is for {names}; {{name}} needs rows of one text, and an episode may have branches"
    online = algorithm(lambda each: not each.offline) & ~MAKES_DATA
    yield Rule(path, (AGENT & online).implies(algorithm(_learns)), message)
    message = "is a model, which reads one text, and an episode of rollout.agent may have branches"
    yield Rule("models.reward", AGENT.implies(~REWARD_MODEL), message)


def _learns(each: type[Algorithm]) -> bool:
    """Whether an algorithm can learn from episodes with branches."""
    return issubclass(each, PolicyGradient) and not sums_over_rows(each) and not READERS & {*each.parameters}


def sums_over_rows(each: type[Algorithm]) -> bool:
    """Whether the advantages of an algorithm sum the rewards of single turns along a row."""
    return "rewards" in signature(getattr(each, "advantage", print)).parameters
