"""Rewards and advantages: pure numbers, computed where the actor lives so that the controller never holds them.

Every algorithm has its estimator; what they share is how a response's score becomes the rewards of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from rlhf_api.algorithms import GRPO, REINFORCEPP, ActorCritic, PolicyGradient
from rlhf_api.job import Job
from rlhf_trainer.ops.advantages import (
    gae,
    on_every_token,
    overlong_penalty,
    rewards_to_go,
    shape_scores,
    token_rewards,
)
from rlhf_trainer.ops.groups import first_groups, group_advantages, has_signal, leave_one_out
from rlhf_trainer.ops.kl import adaptive_coefficient, kl_estimate
from rlhf_trainer.ops.masks import masked_sum, row_sums, whiten
from rlhf_trainer.ops.running import RunningMoments
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import rows_of_all_ranks, sum_over_ranks
from rlhf_trainer.types import Batch, Fields, register

REWARD_FIELDS = ("scores", "finished", "valid", "response_mask", "old_log_probs", "ref_log_probs")


class AdvantageWorker:
    """What the estimators share; holds the KL coefficient and the running moments of the reward."""

    def __init__(self, job: Job) -> None:
        assert isinstance(job.spec.algorithm, PolicyGradient)
        self.job = job
        self._settings = job.spec.algorithm
        self.kl_coefficient = self._settings.kl.coefficient
        self.reward_moments = RunningMoments()

    @register(ONE_TO_ALL)
    def counters(self) -> dict[str, Any]:
        """What a checkpoint holds: JSON values, the same on every rank."""
        return {"kl_coefficient": self.kl_coefficient, "reward_moments": asdict(self.reward_moments)}

    @register(ONE_TO_ALL)
    def set_counters(self, *, counters: Mapping[str, Any]) -> None:
        """Go back to what `counters` gave."""
        self.kl_coefficient = counters["kl_coefficient"]
        self.reward_moments = RunningMoments(**counters["reward_moments"])

    def token_rewards(self, batch: Batch) -> Tensor:
        """Rewards [B, T]: the shaped score on the last token of the response, less the KL penalty on each of them."""
        mask, valid, settings = batch["response_mask"], batch["valid"], self._settings.kl
        kl = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], estimator=settings.resolved_estimator)
        self._see(batch["scores"], valid)
        scores = self.shaped(batch["scores"], batch["finished"], mask)
        coefficient = self.kl_coefficient if settings.apply_to == "Reward" else 0.0
        recorder.mean("reward/mean", (batch["scores"] * valid).sum(), valid.sum())
        recorder.mean("kl/reference", row_sums(kl, mask).sum(), valid.sum())
        recorder.maximum("kl/coefficient", self.kl_coefficient)
        self._adapt(row_sums(kl, mask).sum(), valid.sum())
        return token_rewards(scores, kl, mask, kl_coef=coefficient)

    def shaped(self, scores: Tensor, finished: Tensor, mask: Tensor) -> Tensor:
        """Scores [B] after normalisation, clipping and the penalties for a missing end and for length."""
        shaping = self._settings.rewards
        normalizes = shaping.normalization == "Running"
        shaped = shape_scores(
            scores,
            finished,
            mean=self.reward_moments.mean if normalizes else 0.0,
            std=self.reward_moments.std if normalizes else 1.0,
            clip=shaping.clip,
            missing_end_penalty=shaping.missing_end_penalty,
        )
        if overlong := shaping.overlong_penalty:
            shaped = shaped - overlong_penalty(
                mask.sum(1),
                max_tokens=self.job.spec.data.max_response_tokens,
                buffer_tokens=overlong.buffer_tokens,
                coefficient=overlong.coefficient,
            )
        return shaped

    def _see(self, scores: Tensor, valid: Tensor) -> None:
        """Take a step's scores into the running moments."""
        if self._settings.rewards.normalization != "Running":
            return
        count, total = sum_over_ranks([valid.sum(), (scores * valid).sum()])
        mean = total / max(count, 1.0)
        deviation = sum_over_ranks([((scores - mean) ** 2 * valid).sum()])[0]
        if math.isfinite(deviation):  # else every later reward would be lost with this one
            self.reward_moments = self.reward_moments.merge(count, mean, deviation)

    def _adapt(self, kl: Tensor, sequences: Tensor) -> None:
        """Move the KL coefficient towards the target, once a step."""
        settings = self._settings.kl
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


class GeneralizedAdvantage(AdvantageWorker):
    """PPO's: generalized advantage estimation with a critic."""

    @register(DP_PROTO, reads=(*REWARD_FIELDS, "values"), adds=("advantages", "returns"), phase="advantage")
    def compute_advantage(self, batch: Batch) -> Fields:
        """GAE over token rewards (score at the end, KL penalty at each token): advantages and returns [B, T]."""
        settings, mask = self._settings, batch["response_mask"]
        assert isinstance(settings, ActorCritic)
        rewards = self.token_rewards(batch)
        advantages, returns = gae(rewards, batch["values"], mask, gamma=settings.discount, lam=settings.gae_lambda)
        if settings.whiten_advantages:
            advantages = whitened(advantages, mask)
        return {"advantages": advantages, "returns": returns}


class GreedyBaselineAdvantage(AdvantageWorker):
    """ReMax's: the baseline is the score of the greedy response to the same prompt."""

    @register(
        DP_PROTO,
        reads=(*REWARD_FIELDS, "greedy_scores", "greedy_finished", "greedy_response_mask"),
        adds=("advantages",),
        phase="advantage",
    )
    def compute_advantage(self, batch: Batch) -> Fields:
        """Rewards to go less the greedy response's score (arXiv:2310.10505, Algorithm 1): advantages [B, T]."""
        mask, greedy = batch["response_mask"], batch["greedy_scores"]
        to_go = rewards_to_go(self.token_rewards(batch), mask)
        baseline = self.shaped(greedy, batch["greedy_finished"], batch["greedy_response_mask"])
        recorder.mean("reward/greedy", (greedy * batch["valid"]).sum(), batch["valid"].sum())
        return {"advantages": to_go - on_every_token(baseline, mask)}


class GroupAdvantage(AdvantageWorker):
    """GRPO's and Dr. GRPO's: a response beside the others to its prompt; with DAPO's choice of prompts.

    The rows of a group lie side by side but may be cut over ranks, so the returns of all rows, one number each, are
    gathered: every rank sees whole groups, wherever they are cut.
    """

    @register(DP_PROTO, reads=REWARD_FIELDS, adds=("advantages", "response_mask"), phase="advantage")
    def compute_advantage(self, batch: Batch) -> Fields:
        """Group-relative advantages [B, T], and the response mask without the groups that are not trained on."""
        settings, size = self._settings, self.job.spec.rollout.samples_per_prompt
        assert isinstance(settings, GRPO)
        mask, here = batch["response_mask"], slice(batch.start, batch.start + batch.size)
        returns = rows_of_all_ranks(row_sums(self.token_rewards(batch), mask), batch.start)
        advantages = group_advantages(returns, group_size=size, by_std=settings.normalize_by_std)[here]
        signal = has_signal(rows_of_all_ranks(batch["scores"], batch.start), group_size=size)
        recorder.mean("groups/with_signal", (signal[here] * batch["valid"]).sum(), batch["valid"].sum())
        if settings.oversampling:
            most = self.job.spec.training.prompt_batch_size or 0
            mask = mask * first_groups(signal, group_size=size, most=most)[here, None]
        return {"advantages": on_every_token(advantages.float(), mask), "response_mask": mask}


class LeaveOneOutAdvantage(AdvantageWorker):
    """RLOO's: the baseline is the mean return of the other responses to the prompt."""

    @register(DP_PROTO, reads=REWARD_FIELDS, adds=("advantages",), phase="advantage")
    def compute_advantage(self, batch: Batch) -> Fields:
        """The return of the response less that of the others (arXiv:2402.14740): advantages [B, T]."""
        mask = batch["response_mask"]
        returns = rows_of_all_ranks(row_sums(self.token_rewards(batch), mask), batch.start)
        advantages = leave_one_out(returns, group_size=self.job.spec.rollout.samples_per_prompt)
        return {"advantages": on_every_token(advantages[batch.start : batch.start + batch.size].float(), mask)}


class BatchAdvantage(AdvantageWorker):
    """REINFORCE++'s: rewards to go, normalised over the tokens of the whole batch."""

    @register(DP_PROTO, reads=REWARD_FIELDS, adds=("advantages",), phase="advantage")
    def compute_advantage(self, batch: Batch) -> Fields:
        """(A - mean(A)) / std(A) of the rewards to go, less the group's mean score if asked (arXiv:2501.03262)."""
        settings, mask = self._settings, batch["response_mask"]
        assert isinstance(settings, REINFORCEPP)
        rewards = self.token_rewards(batch)
        advantages = rewards_to_go(rewards, mask)
        if settings.baseline == "Group":
            scores = rows_of_all_ranks(self.shaped(batch["scores"], batch["finished"], mask), batch.start)
            size = self.job.spec.rollout.samples_per_prompt
            centred = group_advantages(scores, group_size=size, by_std=False)
            baseline = (scores - centred)[batch.start : batch.start + batch.size]
            advantages = advantages - on_every_token(baseline.float(), mask)
        return {"advantages": whitened(advantages, mask)}


def whitened(x: Tensor, mask: Tensor) -> Tensor:
    """The masked values [B, T] with mean 0 and variance 1 over all ranks."""
    total, count = sum_over_ranks([masked_sum(x, mask), mask.sum()])
    mean = total / max(count, 1.0)
    variance = sum_over_ranks([masked_sum((x - mean) ** 2, mask)])[0] / max(count, 1.0)
    return whiten(x, mask, mean=mean, std=variance**0.5)
