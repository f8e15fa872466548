"""Supervised fine-tuning on written responses, RLHF's first stage (Ouyang et al., arXiv:2203.02155, 3.5)."""

from __future__ import annotations

from rlhf_trainer.algorithms.models import B, SupervisedActor


def step(completions: B, *, actor: SupervisedActor[B]) -> None:
    """One optimizer step on a batch of prompts with their responses."""
    actor.update_actor(completions)
