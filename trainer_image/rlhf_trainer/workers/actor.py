"""The actor: generates, recomputes its log-probabilities, and is trained by PPO's clipped loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_api.spec import PPO
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.generation.engine import GenerationEngine, Response, response_seed
from rlhf_trainer.ops.kl import kl_estimate
from rlhf_trainer.ops.log_probs import token_entropy, token_log_probs
from rlhf_trainer.ops.losses import kl_loss, policy_loss
from rlhf_trainer.ops.masks import masked_sum
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import device_here, largest_over_ranks, sum_over_ranks
from rlhf_trainer.training.mini_batches import deal
from rlhf_trainer.training.models import inner, load_language_model
from rlhf_trainer.training.sharding import full_weights
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.base import TrainedModel, WorkerSetting, lengths_of, log_probs_by

FIRST_RATIO_LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.1}
ROLLOUT_KL_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Largest |ratio - 1| on a step's first mini-batch, and KL to the rollout a token, that rounding explains."""

UPDATE_FIELDS = ("tokens", "attention_mask", "response_mask", "old_log_probs", "ref_log_probs", "advantages")


class ActorWorker(TrainedModel):
    """One rank of the actor: its training shard, and a generation engine that gets each new policy version."""

    def __init__(self, setting: WorkerSetting, *, max_sequences: int) -> None:
        """`max_sequences`: the most responses that this rank generates at once."""
        job = setting.job.spec
        model = load_language_model(
            setting.folder,
            seed=job.training.seed,
            trust_remote_code=setting.model.trust_remote_code,
            revision=setting.model.revision,
        )
        max_tokens = job.data.max_prompt_tokens + job.data.max_response_tokens
        longest = getattr(inner(model).config, "max_position_embeddings", max_tokens)
        if longest < max_tokens:
            raise ConfigError(
                f"{setting.job.name}: spec.data: maxPromptTokens + maxResponseTokens is {max_tokens}; "
                f"the model {setting.folder} reads {longest} tokens at most"
            )
        super().__init__(setting, setting.trainer(model))
        assert isinstance(job.algorithm, PPO)
        self._algorithm = job.algorithm
        self._generator = GenerationEngine(
            setting.folder,
            config=inner(model).config,
            rollout=job.rollout,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            eos_token=int(self.tokenizer.eos_token_id),
            device=device_here(),
            dtype=setting.compute_dtype,
            trust_remote_code=setting.model.trust_remote_code,
            revision=setting.model.revision,
        )
        self.policy_version = 0
        self._generator_version = -1

    @register(ONE_TO_ALL)
    def counters(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors: JSON values, the same on every rank."""
        return {**super().counters(), "policy_version": self.policy_version}

    @register(ONE_TO_ALL)
    def set_counters(self, *, counters: Mapping[str, Any]) -> None:
        """Go back to what `counters` gave."""
        super().set_counters(counters=counters)
        self.policy_version, self._generator_version = counters["policy_version"], -1

    @register(
        DP_PROTO,
        reads=("prompt_ids", "prompt_mask", "valid"),
        adds=("tokens", "attention_mask", "response_mask", "rollout_log_probs", "finished"),
    )
    def generate_sequences(self, batch: Batch) -> Fields:
        """Sample a response to each prompt (HybridFlow Table 4); what row r gets depends on (seed, step, r) only.

        Adds tokens int64 [B, T], attention_mask and response_mask [B, T], rollout_log_probs [B, T], finished [B].
        """
        self._reshard()
        seed = self.setting.job.spec.training.seed
        lengths = batch["prompt_mask"].sum(1).long().tolist()
        prompts = [row[:length].tolist() for row, length in zip(batch["prompt_ids"], lengths, strict=True)]
        with recorder.span("generation", "actor.generate_sequences"):
            responses = self._generator.generate(
                prompts,
                [response_seed(seed, batch.step, row) for row in batch.rows.tolist()],
                max_tokens=self.setting.job.spec.data.max_response_tokens,
            )
        fields = lay_out(prompts, responses, pad_token=int(self.tokenizer.pad_token_id))
        fields["response_mask"] = fields["response_mask"] * batch["valid"][:, None]
        recorder.maximum("policy_version", self.policy_version)
        recorder.mean("response_length/mean", fields["response_mask"].sum(), batch["valid"].sum())
        recorder.mean("response_finished/mean", (fields["finished"] * batch["valid"]).sum(), batch["valid"].sum())
        recorder.add("tokens", float((fields["attention_mask"] * batch["valid"][:, None]).sum()))
        return fields

    def _reshard(self) -> None:
        """Give the generator the weights of the current policy version, if it has older ones."""
        recorder.add("bytes/reshard", 0)
        with recorder.span("reshard", "actor.reshard"):
            if self._generator_version != self.policy_version:
                self._generator.load_weights(_counted(full_weights(self.trainer.model)))
                self._generator_version = self.policy_version

    @register(
        DP_PROTO,
        reads=("tokens", "attention_mask", "response_mask", "rollout_log_probs"),
        adds=("old_log_probs",),
        phase="scoring",
    )
    def compute_log_prob(self, batch: Batch) -> Fields:
        """Log-probabilities before the first update, by the trainer's own forward pass: old_log_probs [B, T]."""
        old = log_probs_by(self.trainer, batch, temperature=self.setting.job.spec.rollout.temperature)
        mask = batch["response_mask"]
        kl = kl_estimate(batch["rollout_log_probs"], old, estimator="K3")
        total, tokens = float(masked_sum(kl, mask)), float(mask.sum())
        recorder.mean("kl/rollout", total, tokens)
        if self._samples_everything() and not total <= tokens * ROLLOUT_KL_LIMIT[self.setting.compute_dtype]:
            message = f"generator and trainer disagree: KL {total / tokens:.2g} a token, which should be about 0"
            recorder.warn("kl/rollout", message)
        return {"old_log_probs": old}

    @register(DP_PROTO, reads=UPDATE_FIELDS, phase="update")
    def update_actor(self, batch: Batch) -> None:
        """Several epochs of mini-batch updates by the clipped loss, an entropy bonus and, if asked, a KL term."""
        if batch.step <= self._algorithm.critic_warmup_steps:
            return
        training = self.setting.job.spec.training
        for epoch in range(training.update_epochs):
            count = self.setting.job.mini_batches
            dealt = deal(batch.rows, count=count, seed=training.seed, step=batch.step, epoch=epoch)
            for number in range(count):
                self._update(batch, dealt == number, is_first=epoch == number == 0)
        self.policy_version += 1

    def _update(self, batch: Batch, chosen: Tensor, *, is_first: bool) -> None:
        """One optimizer step on the chosen rows."""
        fields = {name: batch[name][chosen] for name in UPDATE_FIELDS}
        tokens = sum_over_ranks([fields["response_mask"].sum()])[0]
        if not tokens:  # nothing but the padding of a short last batch, on every rank
            return

        def loss(model: nn.Module, micro: Fields) -> Tensor:
            return self._loss(model, micro, num_tokens=tokens, is_first=is_first)

        norm = self.trainer.update(fields, lengths_of(batch)[chosen], loss, step=batch.step)
        recorder.maximum("grad_norm/policy", norm)

    def _loss(self, model: nn.Module, micro: Fields, *, num_tokens: float, is_first: bool) -> Tensor:
        """This micro-batch's share of the loss; num_tokens: response tokens of the mini-batch on all ranks."""
        algorithm, temperature = self._algorithm, self.setting.job.spec.rollout.temperature
        mask = micro["response_mask"]
        logits = model(micro["tokens"])
        log_probs = token_log_probs(logits, micro["tokens"], temperature=temperature)
        policy = policy_loss(
            log_probs,
            micro["old_log_probs"],
            micro["advantages"],
            mask,
            clip_eps=algorithm.clip_range,
            num_tokens=num_tokens,
        )
        total = policy.loss
        if algorithm.entropy_coefficient:
            entropy = masked_sum(token_entropy(logits, temperature=temperature), mask)
            total = total - algorithm.entropy_coefficient * entropy / num_tokens
        else:
            with torch.no_grad():
                entropy = masked_sum(token_entropy(logits, temperature=temperature), mask)
        if algorithm.kl.apply_to == "Loss":
            total = total + algorithm.kl.coefficient * kl_loss(
                log_probs,
                micro["ref_log_probs"],
                mask,
                estimator=algorithm.kl.resolved_estimator,
                num_tokens=num_tokens,
            )
        here = float(mask.sum())
        recorder.mean("loss/policy", float(policy.loss.detach()) * num_tokens, here)
        recorder.mean("clip_fraction", float(policy.clip_fraction) * num_tokens, here)
        recorder.mean("entropy", float(entropy.detach()), here)
        if is_first:
            self._check_first_ratio(float(policy.max_ratio_deviation))
        return total

    def _samples_everything(self) -> bool:
        """Whether responses are drawn from the whole distribution; else their log-probabilities differ by design."""
        rollout = self.setting.job.spec.rollout
        return rollout.top_p == 1.0 and rollout.top_k == -1 and rollout.min_response_tokens == 0

    def _check_first_ratio(self, deviation: float) -> None:
        """Before any update the actor still is the one that computed old_log_probs."""
        recorder.maximum("ratio/first_max_deviation", deviation)
        if deviation > FIRST_RATIO_LIMIT[self.setting.compute_dtype]:
            recorder.warn(
                "ratio/first_max_deviation",
                f"the first mini-batch's probability ratio is off 1 by {deviation:.2g}, which should be 0",
            )


def lay_out(prompts: list[list[int]], responses: list[Response], *, pad_token: int) -> Fields:
    """Prompt and response of each row side by side from position 0, padded on the right to the longest of any rank."""
    longest = max(len(prompt) + len(response.tokens) for prompt, response in zip(prompts, responses, strict=True))
    width = largest_over_ranks(longest)  # so that rows fit together however another pool cuts them
    shape = (len(prompts), width)
    tokens = torch.full(shape, pad_token, dtype=torch.int64)
    attention_mask, response_mask, log_probs = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        start, end = len(prompt), len(prompt) + len(response.tokens)
        tokens[row, :end] = torch.tensor([*prompt, *response.tokens])
        attention_mask[row, :end] = 1.0
        response_mask[row, start:end] = 1.0
        log_probs[row, start:end] = torch.tensor(response.log_probs)
    return {
        "tokens": tokens,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        "rollout_log_probs": log_probs,
        "finished": torch.tensor([float(response.finished) for response in responses]),
    }


def _counted(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights as they pass, their bytes counted."""
    for name, weight in weights:
        recorder.add("bytes/reshard", weight.numel() * weight.element_size())
        yield name, weight
