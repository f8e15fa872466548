"""A cost model from pairs of responses and whether each is safe (Safe RLHF, arXiv:2310.12773, section 3.2)."""

from __future__ import annotations

from rlhf_trainer.algorithms.models import B, CostInTraining


def step(pairs: B, *, cost: CostInTraining[B]) -> None:
    """One optimizer step on a batch of pairs."""
    cost.update_cost(pairs)
