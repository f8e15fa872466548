"""Estimates of KL(actor || reference) from sampled tokens, and the scalars that steer a KL to a target."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_api.spec.algorithms import KL, Estimator

MAX_RELATIVE_ERROR = 0.2
"""Bound of the relative error, kl / target - 1, that a step corrects (arXiv:1909.08593, section 2.2)."""
MAX_RATE_FACTOR = 10.0
"""Largest factor by which `RateController` multiplies, or divides, the scheduled learning rate."""
MAX_EXCESS = 10.0
"""Upper bound of kl / target - 1 in `RateController`."""


def kl_estimate(
    log_probs: Float[Tensor, "*shape"], ref_log_probs: Float[Tensor, "*shape"], *, estimator: Estimator
) -> Float[Tensor, "*shape"]:
    """Estimate KL(policy || reference) of each token in nats (Schulman, "Approximating KL divergence", 2020).

    The tokens were sampled from the policy of log_probs. With r = reference / policy of the token:
    K1 = -log r (unbiased), K2 = (log r)^2 / 2 (biased, never negative), K3 = r - 1 - log r (unbiased, never negative).
    """
    log_ratio = ref_log_probs - log_probs
    if estimator == "K1":
        return -log_ratio
    if estimator == "K2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio


@dataclass
class KLController:
    """Coefficient that grows while the KL of responses is above `settings.target` (arXiv:1909.08593, section 2.2)."""

    settings: KL
    value: float

    def follow(self, total: float, count: float) -> None:
        """Move the value after a step of `count` responses; total: sum of their KLs, nats, ignored if not finite.

        error = clip(KL / target - 1, -0.2, 0.2);  value * (1 + error * min(count, horizon) / horizon)
        """
        if self.settings.target is None or not math.isfinite(total):
            return
        error = total / max(count, 1.0) / self.settings.target - 1.0
        error = min(max(error, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.value *= 1.0 + error * min(count, self.settings.horizon) / self.settings.horizon


@dataclass
class RateController:
    """Factor of the learning rate that holds the mean KL of updates at `settings.target`."""

    settings: KL
    value: float = 1.0

    def follow(self, total: float, count: float) -> None:
        """Move the factor after an update of `count` responses; total: sum of their KLs, nats, ignored if not finite.

        value * exp((1 - KL / target) * min(count, horizon) / horizon), from 0.1 to 10

        The KL of one update may be many times the mean. `KLController` clips such values, and so holds the median;
        here the logarithm of the factor adds up the errors, so that their mean goes to 0.
        """
        if self.settings.target is None or not math.isfinite(total):
            return
        error = min(total / max(count, 1.0) / self.settings.target - 1.0, MAX_EXCESS)
        moved = self.value * math.exp(-error * min(count, self.settings.horizon) / self.settings.horizon)
        self.value = min(max(moved, 1.0 / MAX_RATE_FACTOR), MAX_RATE_FACTOR)
