"""Actor of policy-gradient RL: it learns from the advantages of its responses by the clipped loss."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlhf_api.own_code import defined_at
from rlhf_api.spec.algorithms import OBJECTIVE_INPUTS, ActorCritic, Distilling, PolicyGradient, RolloutCorrection
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.expert_rows import ROUTED
from rlhf_trainer.ops.aggregation import aggregate, weight_of
from rlhf_trainer.ops.kl import RateController, kl_estimate
from rlhf_trainer.ops.losses import kl_loss, policy_loss, sft_loss
from rlhf_trainer.ops.masks import masked_sum, row_sums
from rlhf_trainer.ops.rollout_correction import correct_rollout, unit_weights
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.batching import mini_batches
from rlhf_trainer.training.fused_updates import Updates, run_alone, run_together
from rlhf_trainer.training.head import Likelihood
from rlhf_trainer.training.model_input import TokenBatch
from rlhf_trainer.types import PARENTS, Batch, Fields, Marks, register
from rlhf_trainer.workers.base import TEXT_FIELDS, WorkerSetting, log_probs_by, text_fields, text_of
from rlhf_trainer.workers.critic import VALUE_FIELDS, CriticWorker
from rlhf_trainer.workers.data import PRETRAIN_FIELDS
from rlhf_trainer.workers.generating_actor import GeneratingActor, OldLogProbs
from rlhf_trainer.workers.teacher import TEACHER_TOKENS

FIRST_RATIO_LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest |probability ratio - 1| that rounding can explain in a step's first mini-batch, by compute type."""

UPDATE_FIELDS = (*TEXT_FIELDS, "rollout_log_probs", "advantages")
FIELDS_IF_THERE = ("old_log_probs", "ref_log_probs", "token_weights", PARENTS, ROUTED, TEACHER_TOKENS, *PRETRAIN_FIELDS)

WEIGHTS = "rollout_weights"
Loss = Callable[[Likelihood, Fields], Tensor]


class ActorWorker(GeneratingActor):
    """One rank of an actor that is trained by PPO's clipped loss, with the options of GRPO and its variants."""

    def __init__(self, setting: WorkerSetting, *, max_sequences: int, old_log_probs: OldLogProbs = "Pass") -> None:
        """`max_sequences`: the most responses that this rank generates at once."""
        algorithm = setting.job.spec.algorithm
        assert isinstance(algorithm, PolicyGradient)
        super().__init__(setting, max_sequences=max_sequences, old_log_probs=old_log_probs)
        self._algorithm = algorithm
        self.has_scored = old_log_probs == "Pass"
        """Whether `compute_log_prob` makes a forward pass; then only rounding moves the first update's ratio off 1."""
        differs = setting.job.max_staleness > 0 or setting.job.spec.rollout.is_rounded
        self._correction = algorithm.rollout_correction or (RolloutCorrection() if differs else None)
        with_critic = algorithm if isinstance(algorithm, ActorCritic) else None
        self._pretrain = (with_critic.pretrain_coefficient or 0.0) if with_critic else 0.0
        if algorithm.kl.controller == "LearningRate":
            self.trainer.rate_factor = RateController(algorithm.kl)
        self._first_step = 1 + (with_critic.critic_warmup_steps if with_critic else 0)

    @register(THREE_D_PROTO, reads_if_there=PRETRAIN_FIELDS, phase="scoring")
    def compute_loss(self, batch: Batch) -> None:
        """Report the loss on the step's pretraining rows, if it has any (HybridFlow Table 4).

        Only a measurement: `update_actor` computes the loss again, with its gradient.
        """
        if not self._pretrain:
            return
        log_probs, mask = log_probs_by(self.trainer, batch, PRETRAIN_FIELDS), batch["pretrain_response_mask"]
        recorder.mean("loss/pretrain", -masked_sum(log_probs, mask), mask.sum())

    @classmethod
    def change_transfers(cls, marks: Marks, *, setting: WorkerSetting, **arguments: Any) -> Marks:
        """Declare that `update_actor` also gets the critic, and reads the critic's fields, if updates are fused."""
        marks = super().change_transfers(marks, setting=setting, **arguments)
        if not setting.fuses_updates:
            return marks
        reads = tuple(dict.fromkeys((*UPDATE_FIELDS, *VALUE_FIELDS)))
        return {**marks, "update_actor": replace(marks["update_actor"], reads=reads, beside="critic")}

    @register(THREE_D_PROTO, reads=UPDATE_FIELDS, reads_if_there=FIELDS_IF_THERE, phase="update")
    def update_actor(self, batch: Batch, *, critic: CriticWorker | None = None) -> None:
        """Make several epochs of updates by the clipped loss and, if set, entropy, KL and pretraining terms.

        critic: the critic in this process, if its updates are fused with the actor's; else None.
        """
        updates, version = self._updates(batch), self.policy_version
        if critic:
            run_together([(self.trainer.mesh, updates), (critic.trainer.mesh, critic.updates(batch))])
        else:
            run_alone(updates)
        if self.trainer.rate_factor and self.policy_version > version:
            self._steer(batch, self.trainer.rate_factor)

    def _steer(self, batch: Batch, factor: RateController) -> None:
        """Measure the KL between the policies before and after a step's update; adapt the learning rate to it."""
        names, temperature = text_fields(batch.fields, ROUTED), self.setting.job.spec.rollout.temperature
        after, mask = log_probs_by(self.trainer, batch, names, temperature=temperature), batch["response_mask"]
        total = row_sums(kl_estimate(batch["old_log_probs"], after, estimator="K2"), mask).sum()
        count = (mask > 0).any(1).sum()
        recorder.mean("kl/update", total, count)
        recorder.maximum("learning_rate/factor", factor.value)
        factor.follow(*self.trainer.mesh.sum([total, count]))

    def _updates(self, batch: Batch) -> Updates[None]:
        if batch.step < self._first_step:
            return
        training = self.setting.job.spec.training
        rows = {name: batch[name] for name in (*UPDATE_FIELDS, *FIELDS_IF_THERE) if name in batch.fields}
        if self._must_skip(rows):
            return
        if self._correction and "old_log_probs" in rows:
            rows[WEIGHTS] = self._rollout_weights(rows["old_log_probs"], rows, self._correction)
        trained = (batch["response_mask"] > 0).any(1)  # no padding, and not left out by dynamic sampling
        with self.next_policy():
            batches = mini_batches(trained, batch, training, self.trainer.mesh, size=training.mini_batch_size)
            for number, chosen in enumerate(batches):
                fields = {name: field[chosen] for name, field in rows.items()}
                yield from self._update(fields, step=batch.step, is_first=number == 0)

    def _must_skip(self, rows: Fields) -> bool:
        """Whether the step makes no update, as generator and trainer are too far apart (`spec.watch.mismatch`)."""
        gate = self.setting.job.spec.watch.mismatch
        if gate is None or not gate.stops_update:
            return False
        kl = kl_estimate(rows["rollout_log_probs"], rows["old_log_probs"], estimator="K3")
        mask, mesh = rows["response_mask"], self.trainer.mesh
        total, tokens = mesh.sum([masked_sum(kl, mask), mask.sum()])
        is_beyond = not total <= gate.kl * tokens  # NaN exceeds the gate, too
        is_counted = is_beyond and mesh.coordinate("data") == 0  # the record sums over the data axis
        recorder.add("skipped_updates/mismatch", float(is_counted))
        return is_beyond

    def _update(self, fields: Fields, *, step: int, is_first: bool) -> Updates[None]:
        """Make one optimizer step of the actor on the rows of a mini-batch."""
        normalizer = self.trainer.mesh.sum([self._weight(fields["response_mask"])])[0]
        differences: list[Tensor] = []

        def loss(found: Likelihood, micro: Fields) -> Tensor:
            total, deviation = self._loss(found, micro, normalizer=normalizer)
            if is_first:
                # without a scoring pass this is the first pass over the responses
                differences.append(deviation if self.has_scored else self._measure(found.log_probs.detach(), micro))
            return total

        term = self._with_pretraining(loss, fields) if self._pretrain else loss
        with self.routing_measured() if is_first and not self.has_scored else nullcontext():
            norm, _ = yield from self.trainer.updating(fields, self._texts_of, term, step=step)
        recorder.maximum("grad_norm/policy", norm)
        if differences and self.has_scored:
            deviation = float(torch.stack(differences).max())  # only rounding should move the ratio off 1
            recorder.maximum("ratio/first_max_deviation", deviation)
            if deviation > FIRST_RATIO_LIMIT[self.setting.compute_dtype]:
                sentence = f"the first mini-batch's probability ratio is off 1 by {deviation:.2g}, which should be 0"
                recorder.warn("ratio/first_max_deviation", sentence)
        elif differences:
            self.warn_of_mismatch(torch.stack(differences).sum(0))

    def _with_pretraining(self, loss: Loss, fields: Fields) -> Loss:
        """Return a loss function: `loss` plus the loss of pretraining texts, whose rows follow those of responses."""
        tokens = self.trainer.mesh.sum([fields["pretrain_response_mask"].sum()])[0]

        def both(found: Likelihood, micro: Fields) -> Tensor:
            rows, width = micro["tokens"].shape
            mask = micro["pretrain_response_mask"]
            text = sft_loss(found.log_probs[rows:, : mask.shape[1]], mask, num_tokens=tokens)
            own = Likelihood(*(each[:rows, :width] for each in (found.log_probs, found.entropy)))
            return loss(own, micro) + self._pretrain * text

        return both

    def _texts_of(self, micro: Fields) -> list[TokenBatch]:
        """Return a micro-batch's model inputs: the responses and, if the job has them, the pretraining texts."""
        temperature = self.setting.job.spec.rollout.temperature
        own = text_of(micro, text_fields(micro, ROUTED), temperature=temperature, entropy=True)
        if TEACHER_TOKENS in micro and isinstance(self._algorithm, Distilling):
            own = replace(own, teacher=micro[TEACHER_TOKENS], compare=self._algorithm.compare)
        return [own, text_of(micro, PRETRAIN_FIELDS)] if self._pretrain else [own]

    def _weight(self, mask: Tensor) -> Tensor:
        """Return the divisor of the loss for the rows of `mask`: tokens or responses, by the job's aggregation."""
        max_tokens = self.setting.job.spec.data.max_response_tokens
        return weight_of(mask, aggregation=self._algorithm.aggregation, max_tokens=max_tokens)

    def _loss(self, found: Likelihood, micro: Fields, *, normalizer: float) -> tuple[Tensor, Tensor]:
        """Return this micro-batch's part of the loss, and the largest |probability ratio - 1|.

        normalizer: sum of `_weight` over the mini-batch's rows on all ranks.
        """
        algorithm = self._algorithm
        mask = micro["response_mask"]
        divided: dict[str, Any] = {"aggregation": algorithm.aggregation, "normalizer": normalizer}
        old = micro["old_log_probs"] if "old_log_probs" in micro else found.log_probs.detach()
        weights = micro.get(WEIGHTS)
        if weights is None and self._correction:
            weights = self._rollout_weights(old, micro, self._correction)
        policy = policy_loss(
            found.log_probs,
            old,
            micro["advantages"],
            mask,
            clip_ranges=algorithm.clip_ranges,
            ratio=algorithm.resolved_ratio,
            weights=weights,
            **divided,
            objective=self._own_objective(micro) if algorithm.objective else None,
        )
        total = policy.loss
        if algorithm.entropy_coefficient:
            bonus = aggregate(found.entropy, mask, **divided)
            total = total - algorithm.entropy_coefficient * bonus
        if algorithm.kl.apply_to == "Loss" and algorithm.kl.coefficient:
            estimator = algorithm.kl.resolved_estimator
            kl = kl_loss(found.log_probs, micro["ref_log_probs"], mask, estimator=estimator, **divided)
            total = total + algorithm.kl.coefficient * kl
        if found.divergence is not None and isinstance(algorithm, Distilling):
            distance = aggregate(found.divergence, mask, **divided)
            total = total + algorithm.divergence_coefficient * distance
            recorder.mean("kl/teacher", masked_sum(found.divergence.detach(), mask), mask.sum())
        tokens = mask.sum()
        recorder.mean("loss/policy", policy.loss.detach().double() * normalizer, self._weight(mask))
        recorder.mean("clip_fraction", policy.clipped_tokens, tokens)
        recorder.mean("entropy", masked_sum(found.entropy.detach(), mask), tokens)
        return total, policy.max_ratio_deviation

    def _own_objective(self, micro: Fields) -> Callable[..., Tensor]:
        """Return the algorithm's objective as a function of the four inputs of `policy_loss`.

        The function raises UserCodeError if the objective's result has another shape than the mask.
        """
        objective = self._algorithm.objective
        assert objective is not None
        names = inspect.signature(objective).parameters

        def checked(*inputs: Tensor) -> Tensor:
            given = dict(zip(OBJECTIVE_INPUTS, (*inputs, micro.get("token_weights")), strict=True))
            found, shape = objective(**{name: given[name] for name in names}), micro["response_mask"].shape
            if not isinstance(found, Tensor) or found.shape != shape:
                what = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
                raise UserCodeError(f"objective gave {what}, expected one {list(shape)}{defined_at(objective)}")
            return found

        return checked

    def _rollout_weights(self, old: Tensor, rows: Fields, correction: RolloutCorrection) -> Tensor:
        """Return each token's importance weight (trainer's over generator's probability); record statistics of weights.

        With `normalize` this is a collective: weights are divided by their mean over all rows of the step.
        """
        mask = rows["response_mask"]
        weights, bounded, vetoed = correct_rollout(old - rows["rollout_log_probs"], mask, correction=correction)
        units = unit_weights(mask, correction.level)
        recorder.mean("corrected_fraction", bounded.sum(), mask.sum())
        recorder.mean("correction/vetoed", vetoed.sum(), (mask > 0).any(1).sum())
        recorder.mean("correction/weight", (weights * units).sum(), units.sum())
        recorder.mean("correction/squared_weight", (weights.double().square() * units).sum(), units.sum())
        if correction.normalize:
            total, count = self.trainer.mesh.sum([(weights * units).sum(), units.sum()])
            weights = weights * (count / total if total > 0.0 else 1.0)
        return weights

    def _measure(self, log_probs: Tensor, micro: Fields) -> Tensor:
        """Record KLs between log-probabilities [b, t] and reference or generator; return the result of `mismatch`."""
        if "old_log_probs" not in micro and "ref_log_probs" in micro:
            mask, estimator = micro["response_mask"], self._algorithm.kl.resolved_estimator
            kl = masked_sum(kl_estimate(log_probs, micro["ref_log_probs"], estimator=estimator), mask)
            recorder.mean("kl/reference", kl, (mask > 0).any(1).sum())
        return self.mismatch(log_probs, micro)
