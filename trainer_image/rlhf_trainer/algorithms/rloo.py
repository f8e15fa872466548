"""REINFORCE leave-one-out (Ahmadian et al., arXiv:2402.14740).

A_i = R_i - mean of the other R_j of the prompt, where R = score - beta * KL of the whole response; no critic.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import Aggregation, PolicyGradient
from rlhf_trainer.algorithms.models import Tensor, sample_and_learn


class RLOO(PolicyGradient):
    paper, comparing = "arXiv:2402.14740", {}
    step = staticmethod(sample_and_learn)
    name: Annotated[Literal["RLOO"], Field(description="RLHF without a critic; baseline: a prompt's other responses.")]
    aggregation: Aggregation = "FixedLength"
    """Loss of a batch; the paper sums over response tokens."""

    def advantage(self, returns: Tensor, *, group_size: int) -> Tensor:
        """Return each response's return less the mean of its prompt's other returns, [N]; NaN returns do not count."""
        groups = returns.reshape(-1, group_size)
        count = groups.isfinite().sum(dim=1, keepdim=True)
        others = (groups.nansum(dim=1, keepdim=True) - groups) / (count - 1).clamp(min=1)
        return ((groups - others) * (count > 1)).flatten()
