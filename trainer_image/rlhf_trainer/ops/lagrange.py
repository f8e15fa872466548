"""Reward against cost: the Lagrange multiplier of Safe RLHF (arXiv:2310.12773)."""

import math

from jaxtyping import Float
from torch import Tensor

MIN_MULTIPLIER = 1e-6
"""The logarithm of a smaller one would soon be that of 0."""


def next_multiplier(multiplier: float, *, cost: float, limit: float, learning_rate: float, maximum: float) -> float:
    """The multiplier after a step whose responses have this mean cost (arXiv:2310.12773, section 3.3 and appendix B).

    ln(lambda) + learning_rate * lambda * (cost - limit), at most ln(maximum): it grows while the cost is above it. It
    stays above 1e-6, from where it can come back.
    """
    moved = math.log(multiplier) + learning_rate * multiplier * (cost - limit)
    return math.exp(min(max(moved, math.log(MIN_MULTIPLIER)), math.log(maximum)))


def reward_less_cost(
    reward: Float[Tensor, "B T"], cost: Float[Tensor, "B T"], *, multiplier: float
) -> Float[Tensor, "B T"]:
    """(reward - multiplier * cost) / (1 + multiplier), of advantages or of rewards (arXiv:2310.12773, appendix B)."""
    return (reward - multiplier * cost) / (1.0 + multiplier)
