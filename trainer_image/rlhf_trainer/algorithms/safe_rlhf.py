"""Safe RLHF (Dai et al., arXiv:2310.12773), as HybridFlow writes it (arXiv:2409.19256, Figure 6).

PPO with A = (A_reward - lambda * A_cost) / (1 + lambda), where ln(lambda) climbs while the mean cost is above its
limit.
"""

from __future__ import annotations

from rlhf_trainer.algorithms.models import Actor, Advantage, B, Cost, Critic, Reference, Reward


def step(
    prompts: B,
    *,
    actor: Actor[B],
    critic: Critic[B],
    reference: Reference[B],
    reward: Reward[B],
    cost: Cost[B],
    advantage: Advantage[B],
    cost_critic: Critic[B] | None = None,
) -> None:
    """One iteration: PPO's, and what costs; without a cost critic the critic values reward less cost."""
    critics = [critic, cost_critic] if cost_critic else [critic]
    batch = actor.generate_sequences(prompts)
    batch = actor.compute_log_prob(batch)
    for each in critics:
        batch = each.compute_values(batch)
    batch = reference.compute_log_prob(batch)
    batch = reward.compute_reward(batch)
    batch = cost.compute_cost(batch)
    batch = advantage.compute_advantage(batch)
    for each in critics:
        each.update_critic(batch)
    actor.compute_loss(batch)
    actor.update_actor(batch)
