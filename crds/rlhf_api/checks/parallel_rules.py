"""Rules that relate a model's parallel sizes to each other; sizes that a manifest leaves open are not checked."""

import operator
from collections.abc import Iterator
from functools import reduce

from rlhf_api.checks.rule import Rule, algorithm
from rlhf_api.expressions import Expression, Field


def sizes_of_generation(*, unless: Expression) -> Iterator[Rule]:
    """Yield the rules that the actor's sizes in generation divide those in training, unless `unless` holds.

    So a rank's training shard lies in its generation shard (HybridFlow, section 5.3).
    """
    for size in ("tensor", "pipeline"):
        whole = Field(f"models.actor.parallelism.{size}").or_else(1)
        divides = whole % Field(f"rollout.{size}Parallel") == 0
        message = f"is {{value}}, which does not divide models.actor.parallelism.{size}, {{whole}}"
        yield Rule(f"rollout.{size}Parallel", unless | divides, message, {"whole": whole})


def experts_of_actor() -> Iterator[Rule]:
    """Yield rules for the actor's experts and replay, where the manifest sets sizes; the mapper checks all models."""
    path, sizes = "models.actor.parallelism.expert", "models.actor.parallelism"
    size, experts, replicas = Field(path), Field("models.actor.shape.numExperts"), Field(f"{sizes}.replicas")
    data, tensor, context = (Field(f"{sizes}.{name}") for name in ("data", "tensor", "context"))
    message = "is {value}, which does not divide the model's {experts} experts"
    yield Rule(path, experts % size == 0, message, {"experts": experts})
    ranks = data * tensor * context
    message = "is {value}, which does not divide the {ranks} data, context and tensor ranks, in {replicas} replicas"
    divides = (ranks % (replicas * size) == 0) | (data % replicas != 0)
    yield Rule(path, divides, message, {"ranks": ranks, "replicas": replicas})
    stages, replays = Field("rollout.pipelineParallel"), Field("rollout.routing") == "Replay"
    message = "is {value}, but with rollout.routing Replay expected 1: a stage knows the experts of its own layers only"
    yield Rule("rollout.pipelineParallel", replays.implies(stages == 1), message)


def compression() -> Iterator[Rule]:
    """Yield the rule that TopK, for gradients between replicas, needs a trained model with replicas."""
    has_replicas = (
        algorithm(lambda each, role=role: role in each.trained)  # type: ignore[misc]
        & (Field(f"models.{role}.parallelism.replicas").or_else(1) > 1)
        for role in ("actor", "critic", "reward", "cost")
    )
    path = "training.gradientCompression"
    message = "is TopK, but no trained model has parallelism.replicas of more than 1"
    yield Rule(path, (Field(path) == "TopK").implies(reduce(operator.or_, has_replicas)), message)
