"""Importance weights of responses that the generator drew with other probabilities than the trainer gives them."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_api.spec.algorithms import CorrectionLevel, RolloutCorrection
from rlhf_trainer.ops.masks import keep


class CorrectedRollout(NamedTuple):
    """Importance weights of a batch, and the tokens and responses that the correction changed."""

    weights: Float[Tensor, "B T"]
    """Weight of each token, without gradient; 0 outside the mask."""
    bounded: Bool[Tensor, "B T"]
    """Tokens whose weight was out of bounds, and became a bound or 0."""
    vetoed: Bool[Tensor, " B"]
    """Responses whose weights became 0 for one unlikely token."""


def correct_rollout(
    log_ratios: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], *, correction: RolloutCorrection
) -> CorrectedRollout:
    """Return importance weights of tokens, constants in the loss; they are not normalised.

    log_ratios: log of the trainer's / the generator's probability of each token, r_t. The weight of a response's token:

    Token      r_t              (TIS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL
                                training", 2025; with Mask IcePop, arXiv:2510.18855)
    Sequence   prod r_t         (with Mask, and low near 0, MIS: Liu et al., "When speed kills stability", 2025)
    Geometric  (prod r_t)^(1/T) (the ratio of GSPO, arXiv:2507.18071, eq. 7)

    Truncate: min(w, high). Clip: w within low .. high. Mask: 0 for w outside of them. Then veto: 0 for all tokens of a
    response that has a token with r_t < veto.
    """
    log_ratios, here, (low, high) = keep(log_ratios.detach(), mask), mask > 0, correction.bounds
    units = log_ratios if correction.level == "Token" else log_ratios.sum(dim=1, keepdim=True)
    if correction.level == "Geometric":
        units = units / mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    plain = units.exp().expand_as(mask)
    outside = (plain < low) | (plain > high)
    weights = torch.where(outside, 0.0, plain) if correction.mode == "Mask" else plain.clamp(min=low, max=high)
    vetoed = (log_ratios.exp() < (correction.veto or 0.0)).any(dim=1)
    kept = here & ~vetoed[:, None]
    return CorrectedRollout(torch.where(kept, weights, 0.0), kept & outside, vetoed)


def unit_weights(mask: Float[Tensor, "B T"], level: CorrectionLevel) -> Float[Tensor, "B T"]:
    """Return each token's weight in a mean of importance weights: 1 at level Token, else 1 / tokens of its response."""
    return mask if level == "Token" else mask / mask.sum(dim=1, keepdim=True).clamp(min=1.0)


def response_quarters(mask: Float[Tensor, "B T"]) -> Float[Tensor, "4 B T"]:
    """Return masks of the first, second, third and last quarter of each response's tokens."""
    before, count = mask.cumsum(dim=1) - 1.0, mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    quarter = (4.0 * before / count).floor()
    return torch.stack([torch.where(quarter == number, mask, 0.0) for number in range(4)])
