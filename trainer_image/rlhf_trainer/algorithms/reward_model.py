"""A Bradley-Terry reward model from pairs of responses (Ouyang et al., arXiv:2203.02155, equation 1)."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import Algorithm
from rlhf_trainer.algorithms.models import B, RewardInTraining


class RewardModel(Algorithm):
    paper = "arXiv:2203.02155, eq. 1"
    name: Annotated[Literal["RewardModel"], Field(description="Training of a reward model on preference pairs.")]

    @staticmethod
    def step(pairs: B, *, reward: RewardInTraining[B]) -> None:
        """Take one optimizer step of the reward model on a batch of preference pairs."""
        reward.update_reward(pairs)
