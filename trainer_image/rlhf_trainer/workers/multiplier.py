"""The multiplier that weighs cost against reward and follows the costs of each step (Safe RLHF, arXiv:2310.12773)."""

from __future__ import annotations

import math

from rlhf_api.algorithms import Constrained
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import sum_over_ranks
from rlhf_trainer.types import Batch


class Multiplier:
    """The Lagrange multiplier, the same on every rank."""

    def __init__(self, algorithm: Constrained) -> None:
        self._algorithm = algorithm
        self.value = algorithm.lagrange.initial

    def follow(self, batch: Batch) -> None:
        """Move it by the mean cost of the step's responses, once the actor is trained."""
        costs, valid = batch["costs"], batch["valid"]
        total, count = sum_over_ranks([(costs * valid).sum(), valid.sum()])
        if math.isfinite(total) and batch.step > self._algorithm.critic_warmup_steps:
            self.value = self._algorithm.next_multiplier(self.value, cost=total / max(count, 1.0))
        recorder.mean("cost/mean", (costs * valid).sum(), valid.sum())
        recorder.maximum("lagrange/multiplier", self.value)
