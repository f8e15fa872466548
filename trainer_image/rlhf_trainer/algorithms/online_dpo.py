"""Online iterative DPO (RLHF Workflow, Dong et al., arXiv:2405.07863, section 3).

Sample n responses to each prompt, score them, and learn from the best against the worst by DPO's loss.
"""

from __future__ import annotations

from rlhf_trainer.algorithms.models import Actor, B, PairReference, Pairs, Reward


def step(prompts: B, *, actor: Actor[B], reference: PairReference[B], reward: Reward[B], pairs: Pairs[B]) -> None:
    """One iteration; each prompt stands in as many rows as it gets responses."""
    batch = actor.generate_sequences(prompts)
    batch = reward.compute_reward(batch)
    batch = pairs.choose_pairs(batch)
    batch = reference.compute_pair_log_prob(batch)
    actor.update_actor(batch)
