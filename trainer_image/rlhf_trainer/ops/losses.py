"""The losses of the actor, the critic and the preference models, each this call's share of a global mean.

`normalizer`, `num_tokens` and `num_pairs` are the global batch's, so the shares of ranks and micro-batches add up.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_api.spec.algorithms import Aggregation, Estimator, Ratio
from rlhf_trainer.ops.aggregation import aggregate
from rlhf_trainer.ops.kl import kl_estimate
from rlhf_trainer.ops.masks import keep, masked_sum


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """PPO's clipped loss, and measures of the actor's distance from the policy that wrote the responses."""

    loss: Float[Tensor, ""]
    """Clipped policy loss of this call, with gradient."""
    clipped_tokens: Float[Tensor, ""]
    """Number of tokens whose gradient the clip cuts off; add it over micro-batches. No gradient."""
    max_ratio_deviation: Float[Tensor, ""]
    """Largest |ratio - 1| over the mask, 0 when it is empty; take the largest over micro-batches. No gradient."""


def policy_loss(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    clip_ranges: tuple[float, float],
    ratio: Ratio,
    weights: Float[Tensor, "B T"] | None,
    aggregation: Aggregation,
    normalizer: int | float | Tensor,
    objective: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
) -> PolicyLoss:
    """Compute PPO's clipped surrogate (arXiv:1707.06347, eq. 7) of token log-probabilities, negated and aggregated.

    r = exp(log_probs - old_log_probs);  L = weight * min(r * A, clip(r, 1 - low, 1 + high) * A)

    clip_ranges: (low, high); they differ in DAPO (arXiv:2503.14476, eq. 8). ratio "Sequence": r is the geometric mean
    of the response's ratios (GSPO, arXiv:2507.18071, eq. 7). weights: constants, such as those of
    `correct_rollout`; None is 1.
    objective: function (log_probs, old_log_probs, weight * A, mask) that replaces weight * min(r A, clip(r) A), all
    [B, T]. Its first three arguments are 0 outside the mask.
    """
    log_ratio = keep(log_probs - old_log_probs, mask)
    if ratio == "Sequence":
        mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1.0)
        log_ratio = keep(mean.expand_as(mask), mask)
    moved = torch.exp(log_ratio)
    gain = keep(advantages if weights is None else advantages * weights, mask)
    low, high = clip_ranges
    unclipped, clipped = moved * gain, moved.clamp(1.0 - low, 1.0 + high) * gain
    deviation = (moved.detach() - 1.0).abs()
    if objective is None:
        gained = torch.minimum(unclipped, clipped)
    else:
        gained = objective(keep(log_probs, mask), keep(old_log_probs, mask), gain, mask)
    return PolicyLoss(
        loss=-aggregate(gained, mask, aggregation=aggregation, normalizer=normalizer),
        clipped_tokens=masked_sum((clipped < unclipped).to(mask.dtype), mask),
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
    """Return the squared error, clipped as in PPO's reference code (Engstrom et al., arXiv:2005.12729, section 3).

    sum over the mask of max((V - R)^2, (clip(V, V_old - clip_eps, V_old + clip_eps) - R)^2) / 2 / num_tokens

    clip_eps None: the plain squared error, and old_values are not read.
    """
    values, returns = keep(values, mask), keep(returns, mask)
    error = (values - returns).square()
    if clip_eps is not None:
        old_values = keep(old_values, mask)
        clipped = old_values + (values - old_values).clamp(-clip_eps, clip_eps)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * (masked_sum(error, mask) / num_tokens)


def kl_loss(
    log_probs: Float[Tensor, "B T"],
    ref_log_probs: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    estimator: Estimator,
    aggregation: Aggregation,
    normalizer: int | float | Tensor,
) -> Float[Tensor, ""]:
    """Return the aggregated estimate of KL(actor || reference), a loss of its own (arXiv:2402.03300, eq. 3, 4).

    The gradient is that of the estimate itself. Of the estimators K1, K2, K3 only K2 has an unbiased gradient of the
    KL divergence, when the tokens come from the policy of log_probs.
    """
    kl = kl_estimate(keep(log_probs, mask), keep(ref_log_probs, mask), estimator=estimator)
    return aggregate(kl, mask, aggregation=aggregation, normalizer=normalizer)


def sft_loss(
    log_probs: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], *, num_tokens: int | float | Tensor
) -> Float[Tensor, ""]:
    """Return the cross-entropy of given tokens: minus the sum of the log-probabilities over the mask, / num_tokens."""
    return -(masked_sum(log_probs, mask) / num_tokens)


def pair_loss(
    chosen: Float[Tensor, " N"],
    rejected: Float[Tensor, " N"],
    weight: Float[Tensor, " N"],
    *,
    num_pairs: int | float | Tensor,
) -> Float[Tensor, ""]:
    """Return the Bradley-Terry loss of preference pairs (arXiv:2203.02155, eq. 1).

    -sum(weight * log(sigmoid(chosen - rejected))) / num_pairs; a pair of weight 0 (padding) is not read.
    """
    margin = keep(chosen - rejected, weight)
    return -(weight * logsigmoid(margin)).sum() / num_pairs


def sign_loss(
    costs: Float[Tensor, " N"],
    safe: Float[Tensor, " N"],
    weight: Float[Tensor, " N"],
    *,
    num_pairs: int | float | Tensor,
) -> Float[Tensor, ""]:
    """Return the loss of a cost's sign as a prediction of safety (Safe RLHF, arXiv:2310.12773, section 3.2).

    -sum(weight * log(sigmoid(s * cost))) / num_pairs, with s = -1 for a safe response (safe 1) and 1 for an unsafe one.
    """
    signed = keep(torch.where(safe > 0, -costs, costs), weight)
    return -(weight * logsigmoid(signed)).sum() / num_pairs
