"""Estimates of KL(actor || reference) from sampled tokens, and the coefficient that keeps the KL near a target."""

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_api.spec.algorithms import Estimator

MAX_RELATIVE_ERROR = 0.2
"""Bound of the relative error, kl / target - 1, by which the KL coefficient adapts (arXiv:1909.08593, section 2.2)."""


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


def adaptive_coefficient(coefficient: float, *, kl: float, target: float, horizon: float, num_sequences: int) -> float:
    """Return the KL coefficient after a step of `num_sequences` responses (arXiv:1909.08593, section 2.2).

    error = clip(kl / target - 1, -0.2, 0.2);  coefficient * (1 + error * num_sequences / horizon)

    kl: the step's mean KL of a whole response, nats; target: in the same unit; horizon: in responses.
    """
    error = min(max(kl / target - 1.0, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coefficient * (1.0 + error * num_sequences / horizon)
