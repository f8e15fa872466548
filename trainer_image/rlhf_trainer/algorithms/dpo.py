"""Direct preference optimisation (Rafailov et al., arXiv:2305.18290, equation 7).

-log sigmoid(beta * (log pi(y_w) / pi_ref(y_w) - log pi(y_l) / pi_ref(y_l))) for the better y_w and the worse y_l.
"""

from __future__ import annotations

from rlhf_trainer.algorithms.models import B, PairReference, SupervisedActor


def step(pairs: B, *, actor: SupervisedActor[B], reference: PairReference[B]) -> None:
    """One optimizer step on a batch of pairs."""
    pairs = reference.compute_pair_log_prob(pairs)
    actor.update_actor(pairs)
