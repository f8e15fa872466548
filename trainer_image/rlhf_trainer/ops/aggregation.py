"""Aggregation of token losses to one number, and the weight by which the sum is divided."""

from jaxtyping import Float
from torch import Tensor

from rlhf_api.spec.algorithms import Aggregation
from rlhf_trainer.ops.masks import keep


def aggregate(
    x: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], *, aggregation: Aggregation, normalizer: int | float | Tensor
) -> Float[Tensor, ""]:
    """Return this batch's share of a loss over the global batch; `normalizer` is the global batch's `weight_of`.

    TokenMean     sum of x over the mask / tokens of the global batch            (DAPO, arXiv:2503.14476, eq. 8)
    SequenceMean  sum over rows of (sum of x / tokens of the row) / responses     (GRPO, arXiv:2402.03300, eq. 3)
    FixedLength   sum of x over the mask / (responses * longest length)           (Dr. GRPO, arXiv:2503.20783)
    """
    kept = keep(x, mask)
    if aggregation == "SequenceMean":
        kept = kept / mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    return kept.sum() / normalizer


def weight_of(mask: Float[Tensor, "B T"], *, aggregation: Aggregation, max_tokens: int) -> Float[Tensor, ""]:
    """Return the weight of a batch: its tokens, its responses (rows with a token), or responses * `max_tokens`.

    The weights of ranks and micro-batches add up to the global batch's weight.
    """
    if aggregation == "TokenMean":
        return mask.sum()
    responses = (mask > 0).any(dim=1).sum().to(mask.dtype)
    return responses * max_tokens if aggregation == "FixedLength" else responses
