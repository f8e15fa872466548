"""Advantages from scores: shaped scores, rewards per token, generalized advantage estimation."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_trainer.ops.masks import WHITEN_EPS, keep, last_token

SIGNAL = 1e-6
"""Difference between the highest and lowest score of a prompt's responses above which an algorithm learns from them."""


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    *,
    gamma: float,
    lam: float | Float[Tensor, "B 1"],
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Compute advantages and returns by generalized advantage estimation (GAE, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma * V_{t+1} - V_t
    A_t     = delta_t + gamma * lam * A_{t+1}

    t + 1 is the next token of the mask: a masked token passes its successor's value and advantage through, without a
    discount. After the last one both are 0. lam is one number, or one for each row. Returns (advantages, returns), with
    returns = advantages + values where the mask is 1 and both 0 elsewhere. Rewards and values outside the mask are not
    read.
    """
    rewards, values, here = keep(rewards, mask), keep(values, mask), mask > 0
    next_values = _left(_from_the_right(values, torch.where(here, 0.0, torch.ones_like(values))))
    deltas = keep(rewards + gamma * next_values - values, mask)
    advantages = keep(_from_the_right(deltas, torch.where(here, gamma * lam, torch.ones_like(values))), mask)
    return advantages, keep(advantages + values, mask)


def _from_the_right(x: Float[Tensor, "B T"], factors: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Solve y_t = x_t + factors_t * y_{t+1}, with 0 after the last token, in log2(T) steps of doubling reach."""
    reach = 1
    while reach < x.shape[1]:
        x, factors, reach = x + factors * _left(x, reach), factors * _left(factors, reach), 2 * reach
    return x


def _left(x: Float[Tensor, "B T"], by: int = 1) -> Float[Tensor, "B T"]:
    """Shift x to the left: position t gets x_{t + by}, and 0 beyond the last token."""
    return torch.nn.functional.pad(x[:, by:], (0, by))


def shift_values(x: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Shift a value head's outputs from position t - 1 to t: the value of the state before token t; 0 at position 0."""
    return torch.nn.functional.pad(x[:, :-1], (1, 0))


def token_rewards(
    scores: Float[Tensor, " B"], kl: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], *, kl_coef: float
) -> Float[Tensor, "B T"]:
    """Return -kl_coef * kl on each token of the mask, plus the score on the last one (arXiv:2203.02155, eq. 2).

    A row without a token of the mask has no reward. kl: per-token estimate, nats; not read if kl_coef is 0.
    """
    penalty = kl_coef * kl if kl_coef else torch.zeros_like(kl)
    return keep(-penalty, mask) + keep(scores[:, None].expand_as(mask), last_token(mask))


def shape_scores(
    scores: Float[Tensor, " B"],
    ended: Float[Tensor, " B"] | Bool[Tensor, " B"],
    *,
    mean: float,
    std: float,
    clip: float | None,
    missing_end_penalty: float,
) -> Float[Tensor, " B"]:
    """Return shaped scores: (scores - mean) / (std + 1e-8), limited to [-clip, clip], less the penalty.

    The penalty is for responses without an end token (`ended` is 0). It comes after the clip, so it always counts. clip
    None: no limit.
    """
    shaped = (scores - mean) / (std + WHITEN_EPS)
    if clip is not None:
        shaped = shaped.clamp(-clip, clip)
    return torch.where(ended > 0, shaped, shaped - missing_end_penalty)


def overlong_penalty(
    lengths: Float[Tensor, " B"], *, max_tokens: int, buffer_tokens: int, coefficient: float
) -> Float[Tensor, " B"]:
    """Return DAPO's soft penalty, to be subtracted from the score (arXiv:2503.14476, eq. 13).

    It is 0 up to max_tokens - buffer_tokens tokens, then rises linearly to `coefficient` at max_tokens, its maximum.
    """
    return coefficient * ((lengths - (max_tokens - buffer_tokens)) / buffer_tokens).clamp(0.0, 1.0)


def rewards_to_go(rewards: Float[Tensor, "B T"], mask: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Sum the rewards from each token of the mask to the last one, undiscounted; 0 outside the mask."""
    return keep(keep(rewards, mask).flip(1).cumsum(1).flip(1), mask)


def on_every_token(x: Float[Tensor, " B"], mask: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Copy one number per response, [B], to each token of the response, [B, T]; 0 outside the mask."""
    return keep(x[:, None].expand_as(mask), mask)


def has_signal(scores: Float[Tensor, " N"], counted: Bool[Tensor, " N"], *, group_size: int) -> Bool[Tensor, " N"]:
    """Return for each response whether its prompt's scores differ (DAPO, arXiv:2503.14476, eq. 11).

    Each prompt's group_size responses are adjacent. counted: False for ignored responses; a counted NaN gives False.
    """
    highest = scores.masked_fill(~counted, -torch.inf).reshape(-1, group_size).amax(dim=1)
    lowest = scores.masked_fill(~counted, torch.inf).reshape(-1, group_size).amin(dim=1)
    return (highest - lowest > SIGNAL).repeat_interleave(group_size)
