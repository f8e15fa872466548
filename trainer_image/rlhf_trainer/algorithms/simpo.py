"""SimPO: preference pairs without a reference model (Meng et al., arXiv:2405.14734, equation 6).

-log sigmoid(r(y_w) - r(y_l) - margin) with r(y) = beta / |y| * log pi(y), for the better y_w and the worse y_l.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import Preference
from rlhf_trainer.algorithms.models import LogSigmoid, Tensor
from rlhf_trainer.algorithms.orpo import ORPO


class SimPO(Preference):
    paper = "arXiv:2405.14734"
    step = staticmethod(ORPO.step)
    name: Annotated[Literal["SimPO"], Field(description="The actor learns from preference pairs, without a reference.")]
    beta: Annotated[float, Field(gt=0, description="Scale (beta) of a response's mean log-probability.")] = 2.0
    margin: Annotated[float, Field(ge=0, description="Margin (gamma) between the rewards of a pair.")] = 1.0

    def implicit_rewards(self, log_ratios: Tensor, tokens: Tensor) -> Tensor:
        """Return r(y) of responses, [B]; log_ratios: log pi(y)."""
        return self.beta * log_ratios / tokens

    def losses(self, chosen: Tensor, rejected: Tensor, log_sigmoid: LogSigmoid) -> Tensor:
        """Return the loss of each pair, [B]."""
        return -log_sigmoid(chosen - rejected - self.margin)
