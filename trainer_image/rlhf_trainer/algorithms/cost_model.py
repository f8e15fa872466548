"""A cost model from pairs of responses and whether each is safe (Safe RLHF, arXiv:2310.12773, equation 6)."""

from __future__ import annotations

from rlhf_trainer.algorithms.models import B, CostInTraining


def step(pairs: B, *, cost: CostInTraining[B]) -> None:
    """One optimizer step on a batch of pairs."""
    cost.update_cost(pairs)
