"""Kahneman-Tversky optimisation from labelled responses (Ethayarajh et al., arXiv:2402.01306, equations 7 and 8).

Loss: weight * (1 - sigmoid(beta * (r - z0))) for a desirable y, weight * (1 - sigmoid(beta * (z0 - r))) otherwise.
Here r is log pi(y|x) / pi_ref(y|x), and z0 the mean r of the batch's prompts with other rows' responses, at least 0.
z0 comes from the policy before the batch's only update, and has no gradient.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.spec.algorithms import Preference
from rlhf_trainer.algorithms.models import B, LabelledActor, Reference, Tensor


class KTO(Preference):
    paper = "arXiv:2402.01306"
    name: Annotated[Literal["KTO"], Field(description="The actor learns from responses with a label, good or bad.")]
    desirable_weight: Annotated[float, Field(gt=0, description="Weight of the loss of desirable responses.")] = 1.0
    undesirable_weight: Annotated[float, Field(gt=0, description="Weight of the loss of undesirable responses.")] = 1.0

    @staticmethod
    def step(labelled_completions: B, *, actor: LabelledActor[B], reference: Reference[B]) -> None:
        """Take one optimizer step of the actor on a batch of prompts, each with a response and its label."""
        batch = reference.compute_log_prob(labelled_completions)
        batch = reference.compute_mismatched_log_prob(batch)
        batch = actor.compute_reference_point(batch)
        actor.update_actor(batch)

    def losses(self, log_ratios: Tensor, desirable: Tensor, reference_point: Tensor) -> Tensor:
        """Return the loss of each response, [B]; 1 - sigmoid(x) is sigmoid(-x)."""
        weights = self.desirable_weight * desirable + self.undesirable_weight * (1.0 - desirable)
        return weights * (self.beta * (2.0 * desirable - 1.0) * (reference_point - log_ratios)).sigmoid()
