"""A Bradley-Terry reward model from pairs of responses (Ouyang et al., arXiv:2203.02155, equation 1)."""

from __future__ import annotations

from rlhf_trainer.algorithms.models import B, RewardInTraining


def step(pairs: B, *, reward: RewardInTraining[B]) -> None:
    """One optimizer step on a batch of pairs."""
    reward.update_reward(pairs)
