"""Rewards responses that surprise the actor itself, by workers and an objective of its own."""

from typing import Any

import torch

import rlhf
from rlhf.workers import ActorWorker


class CuriousActor(ActorWorker):
    """An actor that tells how sure it was of its responses."""

    @rlhf.register(rlhf.THREE_D_PROTO, reads=("old_log_probs", "response_mask"), adds=("surprise",))
    def compute_surprise(self, batch: rlhf.Batch) -> dict[str, torch.Tensor]:
        """Return surprise [B]: minus the mean log-probability of a response's tokens."""
        mask = batch["response_mask"]
        return {"surprise": -(batch["old_log_probs"] * mask).sum(1) / mask.sum(1).clamp(min=1)}


class Bonus:
    """Rewards surprise."""

    def __init__(self, job: rlhf.Job) -> None:
        assert isinstance(job.spec.algorithm, Curious)
        self.weight = job.spec.algorithm.curiosity

    @rlhf.register(rlhf.DP_PROTO, reads=("scores", "surprise"), adds=("scores",))
    def add_bonus(self, batch: rlhf.Batch) -> dict[str, torch.Tensor]:
        return {"scores": batch["scores"] + self.weight * batch["surprise"]}


class Curious(rlhf.PolicyGradient):
    workers = {"actor": CuriousActor, "bonus": Bonus}

    curiosity: float = 0.1

    @staticmethod
    def step(
        prompts: rlhf.B,
        *,
        actor: Any,
        bonus: Any,
        reference: rlhf.Reference[rlhf.B],
        reward: rlhf.Reward[rlhf.B],
        advantage: rlhf.Advantage[rlhf.B],
    ) -> None:
        batch = actor.compute_log_prob(actor.generate_sequences(prompts))
        batch = actor.compute_surprise(batch)
        batch = reward.compute_reward(reference.compute_log_prob(batch))
        batch = bonus.add_bonus(batch)
        actor.update_actor(advantage.compute_advantage(batch))

    def advantage(self, returns: rlhf.Tensor) -> rlhf.Tensor:
        """Return each response's return minus the mean return of all N responses of the step, [N]."""
        return returns - returns.nanmean()

    def objective(self, log_probs: rlhf.Tensor, old_log_probs: rlhf.Tensor, advantages: rlhf.Tensor) -> rlhf.Tensor:
        """Return ratio * advantage, without clipping."""
        return (log_probs - old_log_probs).exp() * advantages
