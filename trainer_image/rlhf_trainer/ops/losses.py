"""The losses of the actor, the critic and the preference models, each this call's share of a global mean.

`num_tokens` (`num_pairs`) is the count of the global batch, so the shares of ranks and micro-batches add up.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_trainer.ops.kl import KlEstimator, kl_estimate
from rlhf_trainer.ops.masks import keep, masked_mean


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """PPO's clipped loss and how far the actor has moved from the one that wrote the responses."""

    loss: Float[Tensor, ""]
    """The loss, with gradient."""
    clip_fraction: Float[Tensor, ""]
    """Tokens whose gradient the clip cuts off / num_tokens; add over micro-batches. No gradient."""
    max_ratio_deviation: Float[Tensor, ""]
    """Largest |ratio - 1| over the mask, 0 when it is empty; take the largest over micro-batches. No gradient."""


def policy_loss(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    clip_eps: float,
    num_tokens: int | float | Tensor,
) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), negated: -sum over the mask of L / num_tokens.

    ratio = exp(log_probs - old_log_probs);  L = min(ratio * A, clip(ratio, 1 - clip_eps, 1 + clip_eps) * A)
    """
    ratio = torch.exp(keep(log_probs - old_log_probs, mask))
    gain = keep(advantages, mask)
    unclipped = ratio * gain
    clipped = ratio.clamp(1.0 - clip_eps, 1.0 + clip_eps) * gain
    deviation = (ratio.detach() - 1.0).abs()
    return PolicyLoss(
        loss=-masked_mean(torch.minimum(unclipped, clipped), mask, count=num_tokens),
        clip_fraction=masked_mean((clipped < unclipped).to(mask.dtype), mask, count=num_tokens),
        max_ratio_deviation=torch.cat([deviation.flatten(), deviation.new_zeros(1)]).max(),
    )


def value_loss(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    clip_eps: float | None,
    num_tokens: int | float | Tensor,
) -> Float[Tensor, ""]:
    """Squared error of the values, clipped as in PPO's reference code (Engstrom et al., arXiv:2005.12729, section 3).

    sum over the mask of max((V - R)^2, (clip(V, V_old - clip_eps, V_old + clip_eps) - R)^2) / 2 / num_tokens

    clip_eps None: the plain squared error, and old_values are not read.
    """
    values, returns = keep(values, mask), keep(returns, mask)
    error = (values - returns).square()
    if clip_eps is not None:
        old_values = keep(old_values, mask)
        clipped = old_values + (values - old_values).clamp(-clip_eps, clip_eps)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * masked_mean(error, mask, count=num_tokens)


def kl_loss(
    log_probs: Float[Tensor, "B T"],
    ref_log_probs: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    estimator: KlEstimator,
    num_tokens: int | float | Tensor,
) -> Float[Tensor, ""]:
    """Mean over the mask of the estimate of KL(actor || reference), as a loss of its own (arXiv:2402.03300, eq. 3, 4).

    The gradient is that of the estimate itself; of the three only K2's is an unbiased gradient of the KL divergence
    when the tokens come from the policy of log_probs.
    """
    kl = kl_estimate(keep(log_probs, mask), keep(ref_log_probs, mask), estimator=estimator)
    return masked_mean(kl, mask, count=num_tokens)


def sft_loss(
    log_probs: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], *, num_tokens: int | float | Tensor
) -> Float[Tensor, ""]:
    """Cross-entropy: minus the sum of the log-probabilities over the mask, / num_tokens."""
    return -masked_mean(log_probs, mask, count=num_tokens)


def pair_loss(
    chosen: Float[Tensor, " N"],
    rejected: Float[Tensor, " N"],
    weight: Float[Tensor, " N"],
    *,
    num_pairs: int | float | Tensor,
) -> Float[Tensor, ""]:
    """Bradley-Terry loss of preference pairs (arXiv:2203.02155, eq. 1).

    -sum(weight * log(sigmoid(chosen - rejected))) / num_pairs; a pair of weight 0 (padding) is not read.
    """
    margin = keep(chosen - rejected, weight)
    return -(weight * logsigmoid(margin)).sum() / num_pairs
