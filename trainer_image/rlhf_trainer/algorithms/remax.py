"""ReMax (Li et al., arXiv:2310.10505, Algorithm 1): REINFORCE whose baseline is the score of the greedy response.

A = R(x, sampled) - R(x, greedy); no critic.
"""

from __future__ import annotations

from rlhf_trainer.algorithms.models import Actor, Advantage, B, Reference, Reward


def step(prompts: B, *, actor: Actor[B], reference: Reference[B], reward: Reward[B], advantage: Advantage[B]) -> None:
    """One iteration; the greedy pass and its reward are PPO's with `do_sample=False`."""
    batch = actor.generate_sequences(prompts)
    greedy = actor.generate_sequences(prompts, do_sample=False)
    batch = actor.compute_log_prob(batch)
    batch = reference.compute_log_prob(batch)
    batch = reward.compute_reward(batch)
    greedy = reward.compute_reward(greedy)
    batch = advantage.compute_advantage(batch.with_prefixed(greedy=greedy))
    actor.update_actor(batch)
