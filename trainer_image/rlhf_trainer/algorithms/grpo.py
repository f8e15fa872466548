"""Group relative policy optimisation (DeepSeekMath, arXiv:2402.03300, Algorithm 1 and equation 3), and its kin.

A_i = (R_i - mean(R_1 .. R_G)) / std(R_1 .. R_G) for all tokens of response i of the G to a prompt; no critic. Dr. GRPO
(arXiv:2503.20783), DAPO (arXiv:2503.14476) and GSPO (arXiv:2507.18071) are options of the advantage and of the loss.
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
