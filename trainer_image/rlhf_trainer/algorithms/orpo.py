"""ORPO: supervised fine-tuning with an odds ratio, without a reference model (Hong et al., arXiv:2403.07691, eq. 6, 7).

-log P(y_w) - beta * log sigmoid(log(odds(y_w) / odds(y_l))), with P(y) = exp(log pi(y) / |y|), odds = P / (1 - P).
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import Preference
from rlhf_trainer.algorithms.models import B, LogSigmoid, PreferenceActor, Tensor

LEAST = 1e-6
"""Least -log P(y) in the odds, which are infinite at 0."""


class ORPO(Preference):
    paper = "arXiv:2403.07691"
    name: Annotated[Literal["ORPO"], Field(description="Fine-tuning on better responses, with an odds ratio of pairs.")]
    beta: Annotated[float, Field(gt=0, description="Weight (lambda) of the odds ratio's loss.")] = 0.1

    @staticmethod
    def step(pairs: B, *, actor: PreferenceActor[B]) -> None:
        """Take one optimizer step of the actor on a batch of preference pairs."""
        actor.update_actor(pairs)

    def implicit_rewards(self, log_ratios: Tensor, tokens: Tensor) -> Tensor:
        """Return log P(y) of responses, [B]; log_ratios: log pi(y)."""
        return log_ratios / tokens

    def losses(self, chosen: Tensor, rejected: Tensor, log_sigmoid: LogSigmoid) -> Tensor:
        """Return the loss of each pair, [B]."""
        return -chosen - self.beta * log_sigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(log_p: Tensor) -> Tensor:
    log_p = log_p.clamp(max=-LEAST)
    return log_p - (-log_p.expm1()).log()
