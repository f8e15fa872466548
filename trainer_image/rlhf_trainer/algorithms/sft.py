"""Supervised fine-tuning on written responses, RLHF's first stage (Ouyang et al., arXiv:2203.02155, 3.5)."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import Algorithm
from rlhf_trainer.algorithms.models import B, SupervisedActor


class SFT(Algorithm):
    paper = "arXiv:2203.02155"
    name: Annotated[Literal["SFT"], Field(description="Supervised fine-tuning of the actor.")]

    @staticmethod
    def step(completions: B, *, actor: SupervisedActor[B]) -> None:
        """Take one optimizer step of the actor on a batch of prompts with their responses."""
        actor.update_actor(completions)
