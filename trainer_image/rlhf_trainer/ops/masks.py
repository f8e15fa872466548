"""Sums and means over masked tokens; values outside a mask (padding, prompts) never count, NaN included.

A mask is 1.0 where a token counts and 0.0 elsewhere.
"""

import torch
from jaxtyping import Float
from torch import Tensor

WHITEN_EPS = 1e-8
"""Number added to a standard deviation before dividing by it."""


def keep(x: Float[Tensor, "*shape"], mask: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return x where the mask is 1, and exactly 0 with gradient 0 elsewhere, whatever x holds there.

    A NaN survives multiplication by 0, and so does its gradient; hence select, and do so before any arithmetic.
    """
    return torch.where(mask > 0, x, 0.0)


def masked_sum(x: Float[Tensor, "*shape"], mask: Float[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Sum all elements of x where the mask is 1."""
    return keep(x, mask).sum()


def whiten(
    x: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], *, mean: float | Tensor, std: float | Tensor
) -> Float[Tensor, "B T"]:
    """Return (x - mean) / (std + 1e-8) where the mask is 1, 0 elsewhere; mean, std: of the global batch."""
    return keep((x - mean) / (std + WHITEN_EPS), mask)


def row_sums(x: Float[Tensor, "B T"], mask: Float[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Sum x over the tokens of each row where the mask is 1."""
    return keep(x, mask).sum(dim=1)


def last_token(mask: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return 1.0 at each row's last token of the mask, 0.0 elsewhere; a row without a token is all zeros."""
    chosen = mask > 0
    chosen_from_here = chosen.flip(1).cumsum(1).flip(1)
    return (chosen & (chosen_from_here == 1)).to(mask.dtype)
