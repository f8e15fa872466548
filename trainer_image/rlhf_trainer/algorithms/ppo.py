"""PPO with GAE (arXiv:1707.06347, arXiv:1506.02438), as HybridFlow writes it (arXiv:2409.19256, Figure 6)."""

from __future__ import annotations

from rlhf_trainer.algorithms.models import Actor, Advantage, B, Critic, Reference, Reward


def step(
    prompts: B,
    *,
    actor: Actor[B],
    critic: Critic[B],
    reference: Reference[B],
    reward: Reward[B],
    advantage: Advantage[B],
) -> None:
    """One iteration. Every call returns at once and waits, where the models live, for the fields it reads.

    PPO-ptx (arXiv:2203.02155, equation 2): with `data.pretrain` the prompts bring pretraining rows along, whose loss
    `compute_loss` reports and `update_actor` adds to its own.
    """
    batch = actor.generate_sequences(prompts)
    batch = actor.compute_log_prob(batch)
    batch = critic.compute_values(batch)
    batch = reference.compute_log_prob(batch)
    batch = reward.compute_reward(batch)
    batch = advantage.compute_advantage(batch)
    critic.update_critic(batch)
    actor.compute_loss(batch)
    actor.update_actor(batch)
