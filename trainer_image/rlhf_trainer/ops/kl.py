"""Estimates of KL(actor || reference) from sampled tokens, and the scalar that steers a KL to a target."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_api.spec.algorithms import KL, Estimator

MAX_RELATIVE_ERROR = 0.2
"""Bound of the relative error, kl / target - 1, that a step corrects (arXiv:1909.08593, section 2.2)."""


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
    """Scalar that grows while the KL of responses is above `settings.target` (arXiv:1909.08593, section 2.2)."""

    settings: KL
    value: float
    limit: float = math.inf
    """Largest value; the smallest one is 1 / limit."""
    share: float = 1.0
    """Share of a step's KL in the running mean that steers; 1: the step's KL alone, as in the paper."""
    mean: float | None = None
    """Running mean of the KL; None before the first step."""

    def follow(self, total: float, count: float) -> None:
        """Move the value after a step of `count` responses whose KLs add up to `total`, in nats, if that is finite.

        error = clip(mean KL / target - 1, -0.2, 0.2);  value * (1 + error * min(count, horizon) / horizon)
        """
        if self.settings.target is None or not math.isfinite(total):
            return
        kl = total / max(count, 1.0)
        self.mean = kl if self.mean is None else kl + (1.0 - self.share) * (self.mean - kl)
        error = self.mean / self.settings.target - 1.0
        error = min(max(error, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        moved = self.value * (1.0 + error * min(count, self.settings.horizon) / self.settings.horizon)
        self.value = min(max(moved, 1.0 / self.limit), self.limit)
