"""PPO with GAE (arXiv:1707.06347, arXiv:1506.02438), as HybridFlow writes it (arXiv:2409.19256, Figure 6)."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import ActorCritic
from rlhf_trainer.algorithms.models import Actor, B, Critic, CriticsAdvantage, Reference, Reward, Tensor, Whiten


class PPO(ActorCritic):
    paper = "arXiv:1707.06347"
    name: Annotated[Literal["PPO"], Field(description="RLHF with an actor, a critic, a reference and a reward model.")]

    @staticmethod
    def step(
        prompts: B,
        *,
        actor: Actor[B],
        critic: Critic[B],
        reference: Reference[B],
        reward: Reward[B],
        advantage: CriticsAdvantage[B],
    ) -> None:
        """Run one iteration of PPO. Every call returns at once; the worker waits for the fields that the call reads.

        The critic learns from rewards, so its update need not wait for advantages. In a job with one update a step,
        a critic in the actor's pool computes values during that update; then `compute_values` adds none.

        PPO-ptx (arXiv:2203.02155, equation 2): with `data.pretrain` the prompts bring pretraining rows along.
        `compute_loss` reports their loss, and `update_actor` adds it to its own.
        """
        batch = actor.generate_sequences(prompts)
        batch = actor.compute_log_prob(batch)
        batch = critic.compute_values(batch)
        batch = reference.compute_log_prob(batch)
        batch = reward.compute_reward(batch)
        batch = advantage.compute_rewards(batch)
        batch = critic.update_critic(batch)
        batch = advantage.compute_advantage(batch)
        actor.compute_loss(batch)
        actor.update_actor(batch)

    def advantage(self, rewards: Tensor, values: Tensor, mask: Tensor, *, whitened: Whiten) -> Tensor:
        """Return advantages [B, T] by generalized advantage estimation; they are whitened if `whiten_advantages`."""
        from rlhf_trainer.ops.advantages import gae

        advantages, _ = gae(rewards, values, mask, gamma=self.discount, lam=self.gae_lambda)
        return whitened(advantages, mask) if self.whiten_advantages else advantages
