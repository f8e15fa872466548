"""CISPO: REINFORCE with clipped importance weights (MiniMax-M1, arXiv:2506.13585, equations 4 and 5).

J = E[sum_i sum_t sg(clip(r, 1 - low, 1 + high)) * A_i * log pi(o_t) / sum_i |o_i|], where sg stops the gradient. Every
token keeps a gradient, however far the policy has moved. A_i is GRPO's. No critic, no KL penalty.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import NoKL, PolicyGradient
from rlhf_trainer.algorithms.grpo import compare_in_groups
from rlhf_trainer.algorithms.models import Tensor, sample_and_learn


class CISPO(PolicyGradient):
    paper, comparing = "arXiv:2506.13585", {}
    step = staticmethod(sample_and_learn)
    name: Literal["CISPO"]
    """REINFORCE with clipped importance weights; advantages compare a prompt's responses."""
    clip_range: float = Field(0.99, gt=0, lt=1)
    """Clipping of the importance weight below 1; the paper does not clip it."""
    clip_range_high: float = Field(5.0, gt=0)
    """Clipping of the importance weight above 1; the paper names no number."""
    kl: Annotated[NoKL, Field(description="The penalty that keeps the actor near the reference.")] = NoKL()

    def advantage(self, returns: Tensor, *, group_size: int) -> Tensor:
        """Return GRPO's advantages, one for each response of the step: [N]."""
        return compare_in_groups(returns, group_size)

    def objective(self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
        """Return clipped importance weight * A * log pi, [B, T]; the weight has no gradient (equation 4)."""
        low, high = self.clip_ranges
        weights = (log_probs - old_log_probs).exp().clamp(1.0 - low, 1.0 + high).detach()
        return weights * advantages * log_probs
