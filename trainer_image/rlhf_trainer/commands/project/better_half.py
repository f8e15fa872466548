"""Learns from the better half: responses above the mean of their prompt."""

from typing import Annotated

from pydantic import Field

import rlhf


class BetterHalf(rlhf.PolicyGradient):
    comparing = {}  # it compares the responses to a prompt, and so needs several

    sharpness: Annotated[float, Field(gt=0, description="Factor of the advantages.")] = 1.0

    @staticmethod
    def step(
        prompts: rlhf.B,
        *,
        actor: rlhf.Actor[rlhf.B],
        reference: rlhf.Reference[rlhf.B],
        reward: rlhf.Reward[rlhf.B],
        advantage: rlhf.Advantage[rlhf.B],
    ) -> None:
        batch = actor.generate_sequences(prompts)
        batch = actor.compute_log_prob(batch)
        batch = reference.compute_log_prob(batch)
        batch = reward.compute_reward(batch)
        batch = advantage.compute_advantage(batch)
        actor.update_actor(batch)

    def advantage(self, returns: rlhf.Tensor, *, group_size: int) -> rlhf.Tensor:
        """A number for each response of the step, [N]."""
        groups = returns.reshape(-1, group_size)
        better = (groups - groups.nanmean(dim=1, keepdim=True)).clamp(min=0)
        return self.sharpness * better.flatten()
