"""VAPO: PPO whose critic is kept from bias, for long answers with a binary reward (Yue et al., arXiv:2504.05118).

The critic learns from Monte Carlo returns (its lambda is 1), and learns alone in the first steps (section 4.1). The
policy's lambda is larger for a longer response (4.2). A likelihood term imitates right responses (4.3).
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.contract import Whole
from rlhf_api.spec.algorithms import ActorCritic, NoKL
from rlhf_trainer.algorithms.models import Tensor, Whiten
from rlhf_trainer.algorithms.ppo import PPO


class VAPO(ActorCritic):
    paper = "arXiv:2504.05118"
    step = staticmethod(PPO.step)
    estimates = ("advantages", "token_weights")
    name: Literal["VAPO"]
    """PPO for long answers with a binary reward, such as a verifier's."""
    clip_range_high: float = Field(0.28, gt=0, description="Clipping of ratios above 1 (DAPO's clip-higher).")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="Lambda of the critic's returns; 1 is Monte Carlo.")
    lambda_length_scale: float = Field(0.05, gt=0)
    """Alpha of the policy's GAE lambda: 1 - 1 / (alpha * tokens), at least 0."""
    positive_coefficient: float = Field(0.1, ge=0)
    """Weight (mu) of the log-likelihood of responses whose reward is above 0."""
    critic_warmup_steps: Annotated[Whole, Field(description="Number of first steps that update only the critic.")] = 50
    kl: Annotated[NoKL, Field(description="The penalty that keeps the actor near the reference.")] = NoKL()

    def advantage(
        self,
        rewards: Tensor,
        values: Tensor,
        raw_scores: Tensor,
        lengths: Tensor,
        mask: Tensor,
        *,
        rows: slice,
        whitened: Whiten,
    ) -> dict[str, Tensor]:
        """Return GAE with a lambda for each response (section 4.2), and the weights of the likelihood term, [B, T].

        A right response's tokens weigh (tokens of all responses) / (tokens of right ones), so that the mean over all
        tokens becomes the mean over right ones (section 4.3). raw_scores (unshaped), lengths: of all ranks, [N].
        """
        from rlhf_trainer.ops.advantages import gae, on_every_token

        lam = (1.0 - 1.0 / (self.lambda_length_scale * mask.sum(1, keepdim=True).clamp(min=1.0))).clamp(min=0.0)
        advantages, _ = gae(rewards, values, mask, gamma=self.discount, lam=lam)
        is_right = raw_scores > 0
        weights = is_right * lengths.nansum() / (lengths * is_right).nansum().clamp(min=1.0)
        return {
            "advantages": whitened(advantages, mask) if self.whiten_advantages else advantages,
            "token_weights": on_every_token(weights[rows].float(), mask),
        }

    def objective(self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, token_weights: Tensor) -> Tensor:
        """Return PPO's clipped objective plus the weighted log-likelihood of right responses, [B, T] (section 4.3)."""
        low, high = self.clip_ranges
        ratio = (log_probs - old_log_probs).exp()
        clipped = (ratio * advantages).minimum(ratio.clamp(1.0 - low, 1.0 + high) * advantages)
        return clipped + self.positive_coefficient * token_weights * log_probs
