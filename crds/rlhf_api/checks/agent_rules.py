"""Rules for episodes of an agent (`rollout.agent`), whose tokens are a tree."""

from collections.abc import Iterator
from inspect import signature

from rlhf_api.checks.code_rules import AGENT, ENVIRONMENT, TOOLS
from rlhf_api.checks.rule import Rule, algorithm
from rlhf_api.expressions import Field
from rlhf_api.problems import choice
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import ActorCritic, Algorithm, Distilling, PolicyGradient

MAKES_DATA = algorithm(lambda each: each.makes == "data")
MODELS_OF_SUM = Field("models.reward.sum").where(Field("reward.uri", "one").is_given)
REWARD_MODEL = Field("models.reward.uri").is_given | (MODELS_OF_SUM.size() > 0)


def agents() -> Iterator[Rule]:
    """Yield the rules for the program, and for the algorithms and rewards that can learn from its episodes."""
    yield from _program()
    yield from _branches()


def _program() -> Iterator[Rule]:
    path, command = "rollout.agent", Field("rollout.agent.command").is_given
    one = Field("rollout.agent.entrypoint").is_given != command
    yield Rule(path, AGENT.implies(one), "expected exactly one of entrypoint and command")
    yield Rule(path, AGENT.implies(~ENVIRONMENT & ~TOOLS), "plays whole episodes; so does environment or tools")
    unused = ~Field("rollout.agent.arguments").is_given
    yield Rule(f"{path}.arguments", command.implies(unused), "is for an entrypoint; a command has them in itself")
    replays = Field("rollout.routing") == "Replay"
    yield Rule("rollout.routing", AGENT.implies(~replays), "is Replay, but a call of rollout.agent keeps no experts")
    for field in ("promptTemplate", "systemPrompt"):
        written = Field(f"data.{field}").is_given
        yield Rule(f"data.{field}", AGENT.implies(~written), "is for prompts that are not written by rollout.agent")


def sums_over_rows(each: type[Algorithm]) -> bool:
    """Whether the advantages of an algorithm sum the rewards of single turns along a row."""
    return "rewards" in signature(getattr(each, "advantage", print)).parameters


def _branches() -> Iterator[Rule]:
    """Yield the rules for episodes of an agent, whose tokens are a tree."""

    def learns(each: type[Algorithm]) -> bool:
        by_token = issubclass(each, ActorCritic | Distilling) or sums_over_rows(each)
        return issubclass(each, PolicyGradient) and not by_token

    names = choice(name for name, each in ALGORITHMS.items() if learns(each))
    message = f"is for {names}; {{name}} needs rows of one text, and an episode may have branches"
    yield Rule(
        "rollout.agent",
        (AGENT & algorithm(lambda each: not each.offline) & ~MAKES_DATA).implies(algorithm(learns)),
        message,
    )
    message = "is a model, which reads one text, and an episode of rollout.agent may have branches"
    yield Rule("models.reward", AGENT.implies(~REWARD_MODEL), message)
