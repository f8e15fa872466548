"""REINFORCE++ (Hu et al., arXiv:2501.03262).

A_t = score - beta * (KL of the tokens from t on), normalised by mean and deviation of the whole batch; no critic. The
baseline variant first subtracts the mean score of the prompt's responses.
"""

from __future__ import annotations

from rlhf_trainer.algorithms.models import Actor, Advantage, B, Reference, Reward


def step(prompts: B, *, actor: Actor[B], reference: Reference[B], reward: Reward[B], advantage: Advantage[B]) -> None:
    """One iteration."""
    batch = actor.generate_sequences(prompts)
    batch = actor.compute_log_prob(batch)
    batch = reference.compute_log_prob(batch)
    batch = reward.compute_reward(batch)
    batch = advantage.compute_advantage(batch)
    actor.update_actor(batch)
