"""Online iterative DPO (RLHF Workflow, Dong et al., arXiv:2405.07863, section 3).

Sample n responses to each prompt, score them, and learn from the best against the worst by one of DPO's losses.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_trainer.algorithms.dpo import PairLosses
from rlhf_trainer.algorithms.models import B, OnlinePreferenceActor, PairReference, Pairs, Reward


class OnlineDPO(PairLosses):
    paper, comparing = "arXiv:2405.07863", {}
    name: Annotated[Literal["OnlineDPO"], Field(description="DPO on the best and the worst response to each prompt.")]

    @staticmethod
    def step(
        prompts: B, *, actor: OnlinePreferenceActor[B], reference: PairReference[B], reward: Reward[B], pairs: Pairs[B]
    ) -> None:
        """Run one iteration of online DPO; prompts: a row for each response to generate."""
        batch = actor.generate_sequences(prompts)
        batch = reward.compute_reward(batch)
        batch = pairs.choose_pairs(batch)
        batch = reference.compute_pair_log_prob(batch)
        actor.update_actor(batch)
