"""Direct preference optimisation (Rafailov et al., arXiv:2305.18290, equation 7).

-log sigmoid(beta * (log pi(y_w) / pi_ref(y_w) - log pi(y_l) / pi_ref(y_l))) for the better y_w and the worse y_l.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import Preference
from rlhf_trainer.algorithms.models import B, PairReference, PreferenceActor


class DPO(Preference):
    paper = "arXiv:2305.18290"
    name: Annotated[Literal["DPO"], Field(description="The actor learns from preference pairs, without a reward.")]

    @staticmethod
    def step(pairs: B, *, actor: PreferenceActor[B], reference: PairReference[B]) -> None:
        """Take one optimizer step of the actor on a batch of preference pairs."""
        pairs = reference.compute_pair_log_prob(pairs)
        actor.update_actor(pairs)
