"""ReMax (Li et al., arXiv:2310.10505, Algorithm 1): REINFORCE whose baseline is the score of the greedy response.

A = R(x, sampled) - R(x, greedy); no critic.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import Aggregation, PolicyGradient
from rlhf_trainer.algorithms.models import Actor, Advantage, B, Reference, Reward, Tensor


class ReMax(PolicyGradient):
    paper = "arXiv:2310.10505"
    estimates = ("advantages", "response_mask")
    name: Annotated[Literal["ReMax"], Field(description="RLHF without a critic; the baseline is a greedy response.")]
    aggregation: Aggregation = "FixedLength"
    """Loss of a batch; the paper sums over response tokens."""

    @staticmethod
    def step(
        prompts: B, *, actor: Actor[B], reference: Reference[B], reward: Reward[B], advantage: Advantage[B]
    ) -> None:
        """Run one iteration of ReMax; the greedy responses are generated with `do_sample=False` and scored alike."""
        batch = actor.generate_sequences(prompts)
        greedy = actor.generate_sequences(prompts, do_sample=False)
        batch = actor.compute_log_prob(batch)
        batch = reference.compute_log_prob(batch)
        batch = reward.compute_reward(batch)
        greedy = reward.compute_reward(greedy)
        batch = advantage.compute_advantage(batch.with_prefixed(greedy=greedy))
        actor.update_actor(batch)

    def advantage(self, rewards: Tensor, greedy: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the sums of rewards from each token on, less the greedy response's score `greedy` [B]: [B, T].

        Also returns the response_mask [B, T], 0 for responses whose prompt has no greedy score.
        """
        from rlhf_trainer.ops.advantages import on_every_token, rewards_to_go

        mask = mask * greedy.isfinite()[:, None]
        return {"advantages": rewards_to_go(rewards, mask) - on_every_token(greedy, mask), "response_mask": mask}
