"""REINFORCE++ (Hu et al., arXiv:2501.03262).

A_t = score - beta * (KL of the tokens from t on), normalised by mean and deviation of the whole batch; no critic. The
baseline variant first subtracts the mean score of the prompt's responses.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import PolicyGradient
from rlhf_trainer.algorithms.models import Tensor, Whiten, sample_and_learn


class REINFORCEPP(PolicyGradient):
    paper, comparing = "arXiv:2501.03262", {"baseline": "Group"}
    step = staticmethod(sample_and_learn)
    name: Annotated[Literal["REINFORCEPP"], Field(description="RLHF without a critic; batch-normalised advantages.")]
    baseline: Literal["None", "Group"] = "None"
    """Group: the baseline is the mean reward of the prompt's responses (REINFORCE++-baseline)."""

    def advantage(
        self,
        rewards: Tensor,
        mask: Tensor,
        *,
        rows: slice,
        group_size: int,
        whitened: Whiten,
        scores: Tensor | None = None,
    ) -> Tensor:
        """Return rewards summed from each token on (Group: less the prompt's mean score), then whitened: [B, T]."""
        from rlhf_trainer.ops.advantages import on_every_token, rewards_to_go

        advantages = rewards_to_go(rewards, mask)
        if self.baseline == "Group":
            assert scores is not None, "the reward gives them"
            means = scores.reshape(-1, group_size).nanmean(dim=1).repeat_interleave(group_size)
            advantages = advantages - on_every_token(means[rows].float(), mask)
        return whitened(advantages, mask)
