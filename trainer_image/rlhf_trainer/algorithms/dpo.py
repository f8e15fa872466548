"""Direct preference optimisation (Rafailov et al., arXiv:2305.18290, equation 7), and losses of its kin.

r(y) = beta * log(pi(y) / pi_ref(y)) is the implicit reward. lengthNormalized divides it by y's tokens (Tulu 3,
arXiv:2411.15124, section 5.1.2). d is the better response's reward less the worse one's. e is labelSmoothing.

DPO     -log sigmoid(d).
cDPO    -(1 - e) * log sigmoid(d) - e * log sigmoid(-d), which is DPO with e > 0 (Mitchell, "A note on DPO with noisy
        preferences", 2023).
Robust  (-(1 - e) * log sigmoid(d) + e * log sigmoid(-d)) / (1 - 2e) (Chowdhury et al., arXiv:2403.00409).
IPO     (d / beta - 1 / (2 * beta))^2 (Azar et al., arXiv:2310.12036, equation 17).
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import Preference
from rlhf_trainer.algorithms.models import B, LogSigmoid, PairReference, PreferenceActor, Tensor


class PairLosses(Preference):
    """Base of DPO and OnlineDPO: losses of pairs by implicit rewards."""

    loss: Literal["DPO", "Robust", "IPO"] = "DPO"
    """Loss of a pair. Robust: unbiased if a share labelSmoothing of the labels is wrong. IPO: a finite target of the
    margin, without labelSmoothing.
    """
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Probability that a pair's label is wrong.")
    length_normalized: bool = Field(False, description="Divide implicit rewards by the response's number of tokens.")

    def implicit_rewards(self, log_ratios: Tensor, tokens: Tensor) -> Tensor:
        """Return the implicit rewards of responses, [B]; log_ratios: sums over the tokens of a response."""
        return self.beta * (log_ratios / tokens if self.length_normalized else log_ratios)

    def losses(self, chosen: Tensor, rejected: Tensor, log_sigmoid: LogSigmoid) -> Tensor:
        """Return the loss of each pair, [B]; chosen, rejected: implicit rewards."""
        margin, wrong = chosen - rejected, self.label_smoothing
        if self.loss == "IPO":
            return ((margin - 0.5) / self.beta) ** 2
        if not wrong:
            return -log_sigmoid(margin)
        right, flipped = -(1.0 - wrong) * log_sigmoid(margin), -wrong * log_sigmoid(-margin)
        return right + flipped if self.loss == "DPO" else (right - flipped) / (1.0 - 2.0 * wrong)


class DPO(PairLosses):
    paper = "arXiv:2305.18290"
    name: Annotated[Literal["DPO"], Field(description="The actor learns from preference pairs, without a reward.")]

    @staticmethod
    def step(pairs: B, *, actor: PreferenceActor[B], reference: PairReference[B]) -> None:
        """Take one optimizer step of the actor on a batch of preference pairs."""
        pairs = reference.compute_pair_log_prob(pairs)
        actor.update_actor(pairs)
