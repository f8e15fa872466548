"""REINFORCE leave-one-out (Ahmadian et al., arXiv:2402.14740).

A_i = R_i - mean of the other R_j of the prompt, where R = score - beta * KL of the whole response; no critic.
"""

from __future__ import annotations

from rlhf_trainer.algorithms.models import Actor, Advantage, B, Reference, Reward


def step(prompts: B, *, actor: Actor[B], reference: Reference[B], reward: Reward[B], advantage: Advantage[B]) -> None:
    """One iteration; each prompt stands in as many rows as it gets responses."""
    batch = actor.generate_sequences(prompts)
    batch = actor.compute_log_prob(batch)
    batch = reference.compute_log_prob(batch)
    batch = reward.compute_reward(batch)
    batch = advantage.compute_advantage(batch)
    actor.update_actor(batch)
