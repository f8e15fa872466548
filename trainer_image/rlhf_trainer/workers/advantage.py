"""Rewards and advantages: pure numbers, computed where the actor lives so that the controller never holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from rlhf_api.spec import PPO
from rlhf_trainer.ops.advantages import gae, shape_scores, token_rewards
from rlhf_trainer.ops.kl import adaptive_coefficient, kl_estimate
from rlhf_trainer.ops.masks import masked_sum, row_sums, whiten
from rlhf_trainer.ops.running import RunningMoments
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import sum_over_ranks
from rlhf_trainer.types import Batch, Fields, register


class AdvantageWorker:
    """One rank's part of `compute_advantage`; holds the KL coefficient and the running moments of the reward."""

    def __init__(self, algorithm: PPO) -> None:
        self._algorithm = algorithm
        self.kl_coefficient = algorithm.kl.coefficient
        self.reward_moments = RunningMoments()

    @register(
        DP_PROTO,
        reads=("scores", "finished", "valid", "response_mask", "old_log_probs", "ref_log_probs", "values"),
        adds=("advantages", "returns"),
        phase="advantage",
    )
    def compute_advantage(self, batch: Batch) -> Fields:
        """GAE over token rewards (score at the end, KL penalty at each token): advantages and returns [B, T]."""
        algorithm, mask, valid = self._algorithm, batch["response_mask"], batch["valid"]
        estimator = algorithm.kl.resolved_estimator
        kl = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], estimator=estimator)
        in_reward = algorithm.kl.apply_to == "Reward"
        rewards = token_rewards(self._shaped(batch), kl, mask, kl_coef=self.kl_coefficient if in_reward else 0.0)
        advantages, returns = gae(rewards, batch["values"], mask, gamma=algorithm.discount, lam=algorithm.gae_lambda)
        if algorithm.whiten_advantages:
            mean, std = _moments(advantages, mask)
            advantages = whiten(advantages, mask, mean=mean, std=std)
        recorder.mean("reward/mean", (batch["scores"] * valid).sum(), valid.sum())
        recorder.mean("kl/reference", row_sums(kl, mask).sum(), valid.sum())
        recorder.maximum("kl/coefficient", self.kl_coefficient)
        self._adapt(row_sums(kl, mask).sum(), valid.sum())
        return {"advantages": advantages, "returns": returns}

    @register(ONE_TO_ALL)
    def counters(self) -> dict[str, Any]:
        """What a checkpoint holds: JSON values, the same on every rank."""
        return {"kl_coefficient": self.kl_coefficient, "reward_moments": asdict(self.reward_moments)}

    @register(ONE_TO_ALL)
    def set_counters(self, *, counters: Mapping[str, Any]) -> None:
        """Go back to what `counters` gave."""
        self.kl_coefficient = counters["kl_coefficient"]
        self.reward_moments = RunningMoments(**counters["reward_moments"])

    def _shaped(self, batch: Batch) -> Tensor:
        """Scores [B] after normalisation, clipping and the penalty for a missing end of text."""
        shaping, scores, valid = self._algorithm.rewards, batch["scores"], batch["valid"]
        mean, std = 0.0, 1.0
        if shaping.normalization == "Running":
            count, total = sum_over_ranks([valid.sum(), (scores * valid).sum()])
            batch_mean = total / max(count, 1.0)
            deviation = sum_over_ranks([((scores - batch_mean) ** 2 * valid).sum()])[0]
            if math.isfinite(deviation):  # else every later reward would be lost with this one
                self.reward_moments = self.reward_moments.merge(count, batch_mean, deviation)
            mean, std = self.reward_moments.mean, self.reward_moments.std
        return shape_scores(
            scores,
            batch["finished"],
            mean=mean,
            std=std,
            clip=shaping.clip,
            missing_end_penalty=shaping.missing_end_penalty,
        )

    def _adapt(self, kl: Tensor, sequences: Tensor) -> None:
        """Move the KL coefficient towards the target, once a step."""
        settings = self._algorithm.kl
        if settings.controller != "Adaptive" or settings.target is None:
            return
        total, count = sum_over_ranks([kl, sequences])
        if not math.isfinite(total):
            return
        self.kl_coefficient = adaptive_coefficient(
            self.kl_coefficient,
            kl=total / max(count, 1.0),
            target=settings.target,
            horizon=settings.horizon,
            num_sequences=int(count),
        )


def _moments(x: Tensor, mask: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of the masked values of all ranks."""
    total, count = sum_over_ranks([masked_sum(x, mask), mask.sum()])
    mean = total / max(count, 1.0)
    variance = sum_over_ranks([masked_sum((x - mean) ** 2, mask)])[0] / max(count, 1.0)
    return mean, variance**0.5
