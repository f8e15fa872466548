"""Rules between the parallel sizes of a model, as far as a manifest has their numbers."""

from collections.abc import Iterator

from rlhf_api.checks.rule import Rule
from rlhf_api.expressions import Field


def experts_of_actor() -> Iterator[Rule]:
    """Yield the rules for the actor's experts, as far as a manifest has numbers; where slots are known, all models'."""
    path, sizes = "models.actor.parallelism.expert", "models.actor.parallelism"
    size, experts, replicas = Field(path), Field("models.actor.shape.numExperts"), Field(f"{sizes}.replicas")
    data, tensor = Field(f"{sizes}.data"), Field(f"{sizes}.tensor")
    message = "is {value}, which does not divide the model's {experts} experts"
    yield Rule(path, experts % size == 0, message, {"experts": experts})
    ranks = data * tensor
    message = "is {value}, which does not divide the {ranks} data and tensor ranks, in {replicas} replicas"
    divides = (ranks % (replicas * size) == 0) | (data % replicas != 0)
    yield Rule(path, divides, message, {"ranks": ranks, "replicas": replicas})
