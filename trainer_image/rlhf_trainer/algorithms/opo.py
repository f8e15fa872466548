"""OPO: on-policy RL with the optimal reward baseline (Hao et al., arXiv:2505.23585).

A_i = R_i - sum_j(l_j * R_j) / sum_j(l_j) over the G responses to a prompt, of l_j tokens: the baseline with the
smallest variance where the gradient of a response grows with its length. No critic, no KL, no entropy bonus. The paper
learns exactly on-policy, one update a step; a job does so if `training` leaves miniBatchSize and updateEpochs unset.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import Aggregation, NoKL, PolicyGradient
from rlhf_trainer.algorithms.models import Tensor, sample_and_learn


class OPO(PolicyGradient):
    paper, comparing = "arXiv:2505.23585", {}
    step = staticmethod(sample_and_learn)
    name: Literal["OPO"]
    """RLHF without a critic; baseline: mean reward weighted by length."""
    aggregation: Aggregation = "FixedLength"
    """Loss of a batch; the paper sums over response tokens."""
    kl: Annotated[NoKL, Field(description="The penalty that keeps the actor near the reference.")] = NoKL()

    def advantage(self, returns: Tensor, lengths: Tensor, *, group_size: int) -> Tensor:
        """Return each response's return less its prompt's mean return, weighted by lengths: [N] (section 3.2)."""
        groups, weights = returns.reshape(-1, group_size), lengths.reshape(-1, group_size)
        weighed = (weights * groups).nansum(dim=1, keepdim=True)
        baseline = weighed / weights.nansum(dim=1, keepdim=True).clamp(min=1.0)
        return (groups - baseline).flatten()
