"""Rewards and advantages, computed on the actor's ranks, so that the controller never holds the numbers.

The algorithm's file defines the function `advantage`. This module computes the function's inputs, and holds the state
that needs all ranks or lasts longer than a step.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from rlhf_api.job import Job
from rlhf_api.spec.algorithms import ActorCritic, Constrained, PolicyGradient
from rlhf_trainer.ops.advantages import has_signal, on_every_token, overlong_penalty, shape_scores, token_rewards
from rlhf_trainer.ops.kl import KLController, kl_estimate
from rlhf_trainer.ops.masks import keep, masked_sum, row_sums, whiten
from rlhf_trainer.ops.running import RunningMoments
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import rows_of_all_ranks, sum_over_ranks
from rlhf_trainer.types import Batch, Fields, Marks, Transfer, register
from rlhf_trainer.workers.base import with_step

REWARD_FIELDS = ("scores", "finished", "valid", "response_mask")
"""Fields from which rewards are computed; scores may be missing if the algorithm allows jobs without a reward."""
KL_FIELDS = ("old_log_probs", "ref_log_probs")
"""Fields of the KL penalty; a batch may lack them if no reward depends on them (`Job.old_log_probs_by_update`)."""
GREEDY_FIELDS = ("greedy_scores", "greedy_finished", "greedy_response_mask", "greedy_valid")
READ_FOR = {
    "costs": ("token_costs",),
    "greedy": (*GREEDY_FIELDS, "valid"),
    "lengths": ("valid",),
    "raw_scores": ("scores", "valid"),
    "returns": ("valid",),
    "scores": ("scores", "finished", "valid"),
    "signal": ("scores", "valid"),
}
"""Input of an algorithm's `advantage` -> batch fields that it is made from, besides those of the rewards."""


class AdvantageWorker:
    """Worker that computes rewards and advantages; holds KL coefficient, reward moments and Lagrange multiplier."""

    def __init__(self, job: Job) -> None:
        assert isinstance(job.spec.algorithm, PolicyGradient)
        self.job = job
        self._algorithm = job.spec.algorithm
        self._kl = KLController(self._algorithm.kl, self._algorithm.kl.coefficient)
        self.reward_moments = RunningMoments()
        self.multiplier = self._algorithm.lagrange.initial if isinstance(self._algorithm, Constrained) else None

    @classmethod
    def change_transfers(cls, marks: Marks, *, job: Job, **_: object) -> Marks:
        """Declare the fields that `compute_advantage` and, with a critic, `compute_rewards` read and add."""
        assert isinstance(job.spec.algorithm, PolicyGradient)
        return {**advantage_transfers(type(job.spec.algorithm)), **marks}

    @classmethod
    def own_code(cls, method: str, *, job: Job) -> Callable[..., Any] | None:
        """Return the function that errors of `method` point to by file and line: the algorithm's advantage, or None."""
        assert isinstance(job.spec.algorithm, PolicyGradient)
        return job.spec.algorithm.advantage if method == "compute_advantage" else None

    @register(ONE_TO_ALL)
    def counters(self) -> dict[str, Any]:
        """Return the worker's state for a checkpoint: JSON values, the same on every rank."""
        counters = {"kl_coefficient": self._kl.value, "reward_moments": asdict(self.reward_moments)}
        return counters | ({"multiplier": self.multiplier} if self.multiplier else {})

    @register(ONE_TO_ALL)
    def set_counters(self, *, counters: Mapping[str, Any]) -> None:
        """Restore the worker's state from a checkpoint, as `counters` returned it."""
        self._kl.value = counters["kl_coefficient"]
        self.reward_moments = RunningMoments(**counters["reward_moments"])
        self.multiplier = counters.get("multiplier")

    def compute_advantage(self, batch: Batch) -> Fields:
        """Return the fields of the algorithm's advantage; an advantage per response is repeated on its tokens."""
        if "token_rewards" not in batch.fields:
            batch = batch.with_fields(self.compute_rewards(batch))
        if "teacher_log_probs" in batch.fields:
            differences = batch["old_log_probs"] - batch["teacher_log_probs"]
            recorder.mean("kl/teacher", masked_sum(differences, batch["response_mask"]), batch["response_mask"].sum())
        advantage = self._algorithm.advantage
        names = inspect.signature(advantage).parameters
        inputs = {name: INPUTS[name](self, batch) if name in INPUTS else batch.fields.get(name) for name in names}
        found = advantage(**inputs)
        fields: dict[str, Tensor] = found if isinstance(found, dict) else {"advantages": found}
        mask = fields.get("response_mask", batch["response_mask"])
        if (advantages := _checked(fields.get("advantages"), mask, batch)).dim() == 1:
            fields["advantages"] = on_every_token(advantages[_rows(batch)].float(), mask)
        return fields

    def compute_rewards(self, batch: Batch) -> Fields:
        """Return token_rewards [B, T] and, if the algorithm knows costs, token_costs [B, T].

        token_costs are the cost on the last token plus the KL penalty on each token, so a mixture with rewards keeps
        the whole penalty. Without a cost critic token_rewards are this mixture, from which the only critic learns.
        """
        algorithm, rewards = self._algorithm, self.token_rewards(batch)
        fields = {"token_rewards": rewards}
        if isinstance(algorithm, Constrained):
            costs = token_rewards(batch["costs"], self.kl_of(batch), batch["response_mask"], kl_coef=-self.kl_in_reward)
            multiplier = self._follow(batch, algorithm)
            mixed = rewards if algorithm.has_cost_critic else algorithm.weigh(rewards, costs, multiplier)
            fields = {"token_rewards": mixed, "token_costs": costs}
        self._adapt(batch)
        return fields

    def token_rewards(self, batch: Batch) -> Tensor:
        """Return rewards [B, T]: the shaped score on the last token of the response, less the KL penalty on each token.

        In an episode a turn's environment reward is on the turn's last token; the score's rest is on the last token.
        """
        mask, valid, kl = batch["response_mask"], batch["valid"], self.kl_of(batch)
        given = batch.fields.get("scores", torch.zeros_like(valid))
        if self._algorithm.rewards.normalization == "Running":
            self.reward_moments = with_step(self.reward_moments, given, valid)
        scores = self.shaped(given, batch["finished"], mask)
        if "scores" in batch.fields:
            recorder.mean("reward/mean", (given * valid).sum(), valid.sum())
            counted = given.double() * valid
            recorder.deviation("reward/std", counted.sum(), (counted**2).sum(), valid.sum())
        if batch.fields.keys() >= set(KL_FIELDS):
            recorder.mean("kl/reference", row_sums(kl, mask).sum(), valid.sum())
        recorder.maximum("kl/coefficient", self._kl.value)
        if "turn_rewards" not in batch.fields:
            return token_rewards(scores, kl, mask, kl_coef=self.kl_in_reward)
        by_turn = keep(batch["turn_rewards"], mask)
        return by_turn + token_rewards(scores - by_turn.sum(1), kl, mask, kl_coef=self.kl_in_reward)

    def kl_of(self, batch: Batch) -> Tensor:
        """Return the estimated KL of each token, [B, T]; 0 if the batch lacks old or reference log-probabilities."""
        if not batch.fields.keys() >= set(KL_FIELDS):
            assert not self.kl_in_reward
            return torch.zeros_like(batch["response_mask"])
        old, reference = (batch[name] for name in KL_FIELDS)
        return kl_estimate(old, reference, estimator=self._algorithm.kl.resolved_estimator)

    @property
    def kl_in_reward(self) -> float:
        """Coefficient of the KL penalty that is subtracted from the rewards; 0 if the KL is a term of the loss."""
        return self._kl.value if self._algorithm.kl.apply_to == "Reward" else 0.0

    def shaped(self, scores: Tensor, finished: Tensor, mask: Tensor) -> Tensor:
        """Return the scores [B] after normalisation, clipping and the penalties for a missing end and for length."""
        shaping = self._algorithm.rewards
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

    def _follow(self, batch: Batch, algorithm: Constrained) -> float:
        """Update the Lagrange multiplier by the step's mean cost, except in critic warm-up; return the multiplier."""
        costs, valid = batch["costs"], batch["valid"]
        total, count = sum_over_ranks([(costs * valid).sum(), valid.sum()])
        assert self.multiplier is not None
        if math.isfinite(total) and batch.step > algorithm.critic_warmup_steps:
            self.multiplier = algorithm.next_multiplier(self.multiplier, cost=total / max(count, 1.0))
        recorder.mean("cost/mean", (costs * valid).sum(), valid.sum())
        recorder.maximum("lagrange/multiplier", self.multiplier)
        return self.multiplier

    def _adapt(self, batch: Batch) -> None:
        """Adapt the KL coefficient for the next step, so that the KL comes closer to the target."""
        if self._algorithm.kl.controller in ("Coefficient", "Adaptive"):
            total = row_sums(self.kl_of(batch), batch["response_mask"]).sum()
            self._kl.follow(*sum_over_ranks([total, batch["valid"].sum()]))

    def gathered(self, here: Tensor, batch: Batch) -> Tensor | None:
        """Return a number for each row of all ranks, float64 [N]; None if the algorithm compares no responses.

        here: the numbers [B] of this rank's rows. Every rank gets the numbers of all rows, as the responses to a prompt
        may lie on several ranks. A padding row, or a row without a score, is NaN.
        """
        if self._algorithm.comparing and not self._algorithm.compares_responses:
            return None
        return rows_of_all_ranks(here.masked_fill(batch["valid"] == 0, math.nan), batch.start)

    def greedy(self, batch: Batch) -> Tensor:
        """Return the shaped scores [B] of the greedy responses to the same prompts; NaN for a row without a score."""
        scores, finished, mask, valid = (batch[name] for name in GREEDY_FIELDS)
        recorder.mean("reward/greedy", (scores * valid).sum(), valid.sum())
        return self.shaped(scores, finished, mask).masked_fill(valid == 0, math.nan)

    def signal(self, batch: Batch) -> Tensor:
        """Return for each row of all ranks whether the responses to its prompt differ in score, bool [N]."""
        scores = rows_of_all_ranks(batch["scores"], batch.start)
        counted = rows_of_all_ranks(batch["valid"], batch.start) > 0
        signal = has_signal(scores, counted, group_size=self.job.spec.rollout.samples_per_prompt)
        recorder.mean("groups/with_signal", (signal[_rows(batch)] * batch["valid"]).sum(), batch["valid"].sum())
        return signal


def _rows(batch: Batch) -> slice:
    """Return the slice of this rank's rows among the rows of all ranks."""
    return slice(batch.start, batch.start + batch.size)


INPUTS: Mapping[str, Callable[[AdvantageWorker, Batch], Any]] = {
    "mask": lambda _, batch: batch["response_mask"],
    "rewards": lambda _, batch: batch["token_rewards"],
    "costs": lambda _, batch: batch["token_costs"],
    "multiplier": lambda worker, *_: worker.multiplier,
    "greedy": lambda worker, batch: worker.greedy(batch),
    "returns": lambda worker, batch: worker.gathered(row_sums(batch["token_rewards"], batch["response_mask"]), batch),
    "scores": lambda worker, batch: worker.gathered(
        worker.shaped(batch["scores"], batch["finished"], batch["response_mask"]), batch
    ),
    "raw_scores": lambda worker, batch: worker.gathered(batch["scores"], batch),
    "lengths": lambda worker, batch: worker.gathered(batch["response_mask"].sum(1), batch),
    "signal": lambda worker, batch: worker.signal(batch),
    "rows": lambda _, batch: _rows(batch),
    "group_size": lambda worker, *_: worker.job.spec.rollout.samples_per_prompt,
    "prompts": lambda worker, *_: worker.job.spec.training.prompt_batch_size,
    "whitened": lambda *_: whitened,
}
"""Inputs of an algorithm's `advantage`, by parameter name; a parameter of any other name gets that batch field.

mask, rewards and costs are values of this rank's tokens [B, T]. returns (sums of rewards), scores (shaped), raw_scores,
lengths and signal are values of all responses of the step [N]; all but signal are NaN for a response that is padding or
has no score.
"""


def whitened(x: Tensor, mask: Tensor) -> Tensor:
    """Return the masked values [B, T] scaled to mean 0 and variance 1 over all ranks."""
    total, count = sum_over_ranks([masked_sum(x, mask), mask.sum()])
    mean = total / max(count, 1.0)
    variance = sum_over_ranks([masked_sum((x - mean) ** 2, mask)])[0] / max(count, 1.0)
    return whiten(x, mask, mean=mean, std=variance**0.5)


def _checked(advantages: object, mask: Tensor, batch: Batch) -> Tensor:
    """Return the advantages; TypeError or ValueError unless their shape is [B, T], or [N] for the rows of all ranks."""
    expected = f"a tensor {list(mask.shape)}, or [N] with a number for each response of all ranks"
    if not isinstance(advantages, Tensor):
        raise TypeError(f"the advantage is {type(advantages).__name__}, expected {expected}")
    if advantages.shape != mask.shape and advantages[_rows(batch)].shape != (batch.size,):
        raise ValueError(f"the advantage has the shape {list(advantages.shape)}, expected {expected}")
    return advantages


def advantage_transfers(algorithm: type[PolicyGradient]) -> Marks:
    """Return the transfer declarations of an AdvantageWorker for an algorithm.

    The parameters of `algorithm.advantage` give the fields to read, and `algorithm.estimates` the fields to add.
    """
    has_critic, has_costs = issubclass(algorithm, ActorCritic), issubclass(algorithm, Constrained)
    needed, optional = REWARD_FIELDS[algorithm.may_lack_reward :], REWARD_FIELDS[: algorithm.may_lack_reward]
    rewards = Transfer(
        protocol=DP_PROTO,
        reads=(*needed, *("costs",) * has_costs),
        reads_if_there=(*optional, *KL_FIELDS, "turn_rewards"),
        adds=("token_rewards", *("token_costs",) * has_costs),
        phase="advantage",
    )
    reads = ["token_rewards", "response_mask"] if has_critic else [*needed]
    reads_if_there = [] if has_critic else [*optional, *KL_FIELDS, "turn_rewards"]
    for name, parameter in list(inspect.signature(algorithm.advantage).parameters.items())[1:]:
        fields = READ_FOR.get(name, () if name in INPUTS else (name,))
        (reads if parameter.default is parameter.empty else reads_if_there).extend(fields)
    advantage = Transfer(
        protocol=DP_PROTO,
        reads=tuple(dict.fromkeys(reads)),
        reads_if_there=tuple(each for each in dict.fromkeys(reads_if_there) if each not in reads),
        adds=tuple(algorithm.estimates),
        phase="advantage",
    )
    return {"compute_advantage": advantage} | ({"compute_rewards": rewards} if has_critic else {})
