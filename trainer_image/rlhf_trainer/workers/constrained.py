"""The advantages of Safe RLHF: reward against cost, weighed by a multiplier that follows the costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlhf_api.algorithms import SafeRLHF
from rlhf_api.job import Job
from rlhf_trainer.ops.advantages import gae, token_rewards
from rlhf_trainer.ops.kl import kl_estimate
from rlhf_trainer.ops.lagrange import next_multiplier, reward_less_cost
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import sum_over_ranks
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.advantage import REWARD_FIELDS, AdvantageWorker, whitened


class ConstrainedAdvantage(AdvantageWorker):
    """Also holds the Lagrange multiplier."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        assert isinstance(job.spec.algorithm, SafeRLHF)
        self._safety = job.spec.algorithm
        self.multiplier = self._safety.lagrange.initial

    @register(ONE_TO_ALL)
    def counters(self) -> dict[str, Any]:
        """What a checkpoint holds: JSON values, the same on every rank."""
        return {**super().counters(), "multiplier": self.multiplier}

    @register(ONE_TO_ALL)
    def set_counters(self, *, counters: Mapping[str, Any]) -> None:
        """Go back to what `counters` gave."""
        super().set_counters(counters=counters)
        self.multiplier = counters["multiplier"]

    @register(
        DP_PROTO,
        reads=(*REWARD_FIELDS, "values", "costs"),
        reads_if_there=("cost_values",),
        adds=("advantages", "returns", "cost_returns"),
        phase="advantage",
    )
    def compute_advantage(self, batch: Batch) -> Fields:
        """advantages, returns and cost_returns [B, T]; the last are 0 where one critic values reward less cost."""
        self._follow(batch)
        coefficient = self.kl_coefficient  # the one that this step's rewards see; computing them may adapt it
        rewards = self.token_rewards(batch)
        costs = self._token_costs(batch, coefficient)
        if self._safety.separate_cost_critic:
            advantages, returns = self._gae(rewards, batch["values"], batch)
            cost_advantages, cost_returns = self._gae(costs, batch["cost_values"], batch)
            advantages = reward_less_cost(advantages, cost_advantages, multiplier=self.multiplier)
        else:
            mixed = reward_less_cost(rewards, costs, multiplier=self.multiplier)
            advantages, returns = self._gae(mixed, batch["values"], batch)
            cost_returns = returns.new_zeros(returns.shape)
        if self._safety.whiten_advantages:
            advantages = whitened(advantages, batch["response_mask"])
        return {"advantages": advantages, "returns": returns, "cost_returns": cost_returns}

    def _token_costs(self, batch: Batch, coefficient: float) -> Tensor:
        """The cost on the last token, and the KL penalty on each, so that its weight in the mixture stays the same."""
        settings = self._safety.kl
        kl = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], estimator=settings.resolved_estimator)
        weight = -coefficient if settings.apply_to == "Reward" else 0.0
        return token_rewards(batch["costs"], kl, batch["response_mask"], kl_coef=weight)

    def _gae(self, rewards: Tensor, values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        settings = self._safety
        return gae(rewards, values, batch["response_mask"], gamma=settings.discount, lam=settings.gae_lambda)

    def _follow(self, batch: Batch) -> None:
        """Move the multiplier by the mean cost of the step's responses, once the actor is trained."""
        costs, valid = batch["costs"], batch["valid"]
        total, count = sum_over_ranks([(costs * valid).sum(), valid.sum()])
        if math.isfinite(total) and batch.step > self._safety.critic_warmup_steps:
            self.multiplier = next_multiplier(
                self.multiplier,
                cost=total / max(count, 1.0),
                limit=self._safety.cost_limit,
                learning_rate=self._safety.lagrange.learning_rate,
                maximum=self._safety.lagrange.maximum,
            )
        recorder.mean("cost/mean", (costs * valid).sum(), valid.sum())
        recorder.maximum("lagrange/multiplier", self.multiplier)
