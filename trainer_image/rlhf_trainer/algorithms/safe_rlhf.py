"""Safe RLHF (Dai et al., arXiv:2310.12773), as HybridFlow writes it (arXiv:2409.19256, Figure 6).

PPO with A = (A_reward - lambda * A_cost) / (1 + lambda), where ln(lambda) climbs while the mean cost is above its
limit.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import Constrained
from rlhf_trainer.algorithms.models import (
    Actor,
    B,
    Cost,
    CostCritic,
    Critic,
    CriticsAdvantage,
    Reference,
    Reward,
    Tensor,
    Whiten,
)


class SafeRLHF(Constrained):
    paper = "arXiv:2310.12773"
    name: Annotated[Literal["SafeRLHF"], Field(description="PPO with a cost model and a Lagrange multiplier.")]
    separate_cost_critic: bool = True
    """Train a second critic for the costs, which starts from the cost model and has an optimizer of its own. False: one
    critic for rewards and costs.
    """

    @property
    def has_cost_critic(self) -> bool:
        return self.separate_cost_critic

    @staticmethod
    def step(
        prompts: B,
        *,
        actor: Actor[B],
        critic: Critic[B],
        reference: Reference[B],
        reward: Reward[B],
        cost: Cost[B],
        advantage: CriticsAdvantage[B],
        cost_critic: CostCritic[B] | None = None,
    ) -> None:
        """Run one iteration of PPO with costs; without a cost critic the critic predicts reward less cost."""
        critics = [critic, cost_critic] if cost_critic else [critic]
        batch = actor.generate_sequences(prompts)
        batch = actor.compute_log_prob(batch)
        for each in critics:
            batch = each.compute_values(batch)
        batch = reference.compute_log_prob(batch)
        batch = reward.compute_reward(batch)
        batch = cost.compute_cost(batch)
        batch = advantage.compute_rewards(batch)
        for each in critics:
            batch = each.update_critic(batch)
        batch = advantage.compute_advantage(batch)
        actor.compute_loss(batch)
        actor.update_actor(batch)

    def advantage(
        self,
        rewards: Tensor,
        values: Tensor,
        costs: Tensor,
        mask: Tensor,
        *,
        multiplier: float,
        whitened: Whiten,
        cost_values: Tensor | None = None,
    ) -> Tensor:
        """Return the GAE of reward and of cost, weighed by the multiplier, [B, T].

        cost_values [B, T]: predictions of the cost critic. Without a cost critic `rewards` are a mixture of rewards and
        costs already, and the only critic predicts the mixture.
        """
        from rlhf_trainer.ops.advantages import gae

        gamma, lam = self.discount, self.gae_lambda
        advantages, _ = gae(rewards, values, mask, gamma=gamma, lam=lam)
        if self.separate_cost_critic:
            assert cost_values is not None, "the critic of the costs gives them"
            cost_advantages, _ = gae(costs, cost_values, mask, gamma=gamma, lam=lam)
            advantages = self.weigh(advantages, cost_advantages, multiplier)
        return whitened(advantages, mask) if self.whiten_advantages else advantages
