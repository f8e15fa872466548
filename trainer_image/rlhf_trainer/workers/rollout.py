"""What every actor in RL does besides training: it generates responses and recomputes their log-probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.data.tokens import Ids
from rlhf_trainer.errors import ConfigError, NumericsError
from rlhf_trainer.generation.vllm_engine import GenerationEngine, Response, response_seed
from rlhf_trainer.hybrid_engine.hybrid_engine import HybridEngine, engine_groups, stage_layers
from rlhf_trainer.ops.kl import kl_estimate
from rlhf_trainer.ops.masks import keep, masked_sum
from rlhf_trainer.protocols import ONE_TO_ALL, THREE_D_ALL_MICRO_DP, THREE_D_PROTO
from rlhf_trainer.row_groups import Outlet
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.batching import RowCosts
from rlhf_trainer.training.distributed import device_here, largest_over_ranks
from rlhf_trainer.training.models import LanguageModel, inner
from rlhf_trainer.training.trainer import ModelRunner
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.across_pools import WeightReceiver, WeightSender
from rlhf_trainer.workers.base import TrainedModel, WorkerSetting, log_probs_by
from rlhf_trainer.workers.leaving import Ended, Leaving
from rlhf_trainer.workers.reference import OwnReference

ROLLOUT_KL_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""The largest KL between trainer and generator, per token, that rounding can explain, by compute type."""

PROMPT_FIELDS = ("prompt_ids", "prompt_mask", "valid")
ROLLOUT_FIELDS = (
    "tokens",
    "attention_mask",
    "response_mask",
    "rollout_log_probs",
    "finished",
    "sampled",
    "policy_version",
)


class Generating:
    """One rank of a generation engine, which gets each new policy version."""

    setting: WorkerSetting
    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig
    layout: ParallelSizes
    costs: RowCosts
    called = "actor"
    """As what it is asked for responses."""
    policy_version = 0
    generator_version = -1
    """Of the weights that the engine has; -1: it has none."""
    wrong_weights = ""
    """What was wrong with the weights that came last, if anything was."""

    def start_generator(self, *, max_sequences: int) -> None:
        """Once config, layout and costs are known. `max_sequences`: the most that this rank generates at once."""
        setting, job, layout = self.setting, self.setting.job.spec, self.layout
        max_tokens = job.data.max_prompt_tokens + job.data.max_response_tokens
        layers = int(self.config.num_hidden_layers)
        self._generator = GenerationEngine(
            setting.folder,
            config=self.config,
            rollout=job.rollout,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            eos_token=int(self.tokenizer.eos_token_id),
            device=device_here(),
            dtype=setting.compute_dtype,
            trust_remote_code=setting.model.trust_remote_code,
            revision=setting.model.revision,
            tensor_groups=engine_groups(layout),
            stage_layers=stage_layers(layout, layers) if layout.generation_pipeline > 1 else (),
        )

    def close(self) -> None:
        """End the generation engine."""
        self._generator.close()

    @register(THREE_D_ALL_MICRO_DP, reads=PROMPT_FIELDS, adds=ROLLOUT_FIELDS, in_groups=True)
    def generate_sequences(self, batch: Batch, *, do_sample: bool = True, outlet: Outlet | None = None) -> Fields:
        """Sample a response to each prompt (HybridFlow Table 4); what row r gets depends on (seed, step, r) only.

        Without `do_sample` each token is the likeliest one. outlet: gets the rows as they end.
        Adds tokens int64 [B, T], attention_mask and response_mask [B, T], rollout_log_probs [B, T], finished [B],
        sampled [B] (0 without `do_sample`) and policy_version [B, T]: how many steps have trained the weights that
        wrote a token.
        """
        self.reshard()
        leaving = Leaving(outlet, batch, lambda *rows: self._laid_out(batch, *rows, do_sample=do_sample))
        with recorder.span("generation", f"{self.called}.generate_sequences"):
            prompts, responses = self.respond(batch, prompts_in(batch), greedy=not do_sample, ended=leaving.add)
        longest = max(len(prompt) + len(response.tokens) for prompt, response in zip(prompts, responses, strict=True))
        width = self.widest(longest)  # so that another pool can join rows of any ranks
        leaving.end(width)
        fields = self._laid_out(batch, list(range(batch.size)), prompts, responses, width, do_sample=do_sample)
        recorder.add("tokens", float((fields["attention_mask"] * batch["valid"][:, None]).sum()))
        self._measure_generation(fields)
        if do_sample:
            recorder.maximum("policy_version", fields["policy_version"].max())
            recorder.mean("response_length/mean", fields["response_mask"].sum(), batch["valid"].sum())
            recorder.mean("response_finished/mean", (fields["finished"] * batch["valid"]).sum(), batch["valid"].sum())
        return fields

    def respond(
        self, batch: Batch, prompts: list[Ids], *, greedy: bool, ended: Ended
    ) -> tuple[list[Ids], list[Response]]:
        """The prompts of this rank's rows, and a response to each, of which `ended` is told at once."""
        return prompts, self._generator.generate(
            prompts,
            self.seeds(batch),
            max_tokens=self.setting.job.spec.data.max_response_tokens,
            greedy=greedy,
            ended=lambda row, response: ended(row, prompts[row], response),
        )

    def widest(self, longest: int) -> int:
        """The largest of any rank."""
        return largest_over_ranks(longest)

    def seeds(self, batch: Batch) -> list[int]:
        """Of the response to each of this rank's rows."""
        seed = self.setting.job.spec.training.seed
        return [response_seed(seed, batch.step, row) for row in batch.rows.tolist()]

    def _laid_out(
        self,
        batch: Batch,
        rows: list[int],
        prompts: Sequence[Ids],
        responses: Sequence[Response],
        width: int,
        *,
        do_sample: bool,
    ) -> dict[str, Tensor]:
        """What is added for some rows of the batch."""
        fields = lay_out(prompts, responses, width=width, pad_token=int(self.tokenizer.pad_token_id))
        fields["response_mask"] = fields["response_mask"] * batch["valid"][rows][:, None]
        fields["sampled"] = torch.full((len(rows),), float(do_sample))
        return fields

    def _measure_generation(self, fields: Fields) -> None:
        """FLOPs of the response tokens (a cache may have those of prompts), and how full the cache has been."""
        costs, read = self.costs, fields["response_mask"].sum(1).long()
        whole = fields["attention_mask"].sum(1).long()
        done = float((costs.of(whole) - costs.of(whole - read)).sum())
        recorder.add("flops/generation", costs.flops(done, float(read.sum())))
        recorder.maximum("kv_cache_used", self._generator.cache_peak())

    def reshard(self) -> None:
        """Give the generator the weights of the current policy version, unless it has them.

        Here they have come by a call of their own; NumericsError if they were wrong.
        """
        if self.wrong_weights:
            raise NumericsError(self.wrong_weights)


class Colocated(Generating):
    """One rank of a model that generates where its weights are; its shard is `runner`'s."""

    runner: ModelRunner

    def start_generator(self, *, max_sequences: int) -> None:
        """Once the model is there."""
        model = self.runner.model
        self.config, self.layout, self.costs = inner(model.module).config, model.mesh.layout, self.runner.costs
        super().start_generator(max_sequences=max_sequences)
        self._hybrid_engine = HybridEngine(
            model,
            self._generator,
            config=self.config,
            dtype=model.compute_dtype,
            trust_remote_code=self.setting.model.trust_remote_code,
        )

    def put_generator_to_sleep(self) -> None:
        """Free the generator's cache and weights until the next responses."""
        self._generator.sleep()
        self.generator_version = -1
        recorder.maximum("idle_bytes/generator", self._generator.bytes_held())

    def reshard(self) -> None:
        """Unless the generator has them, it gets the weights before its cache."""
        received = 0
        with recorder.span("reshard", "actor.reshard"):
            if self.generator_version != self.policy_version:
                with self.runner.offloader.in_use():
                    received = self._hybrid_engine.to_generation().received
                self._generator.wake_cache()  # after the shards have left: there need not be room for both
                self.generator_version = self._generator.version = self.policy_version
        with recorder.counting(True):
            recorder.add("bytes/reshard", received)


class GeneratorWorker(Colocated):
    """One rank of a model that generates and is not trained."""

    def __init__(self, setting: WorkerSetting, *, max_sequences: int) -> None:
        """`max_sequences`: the most responses that this rank generates at once."""
        self.setting, self.tokenizer = setting, setting.tokenizer()
        self.runner = setting.frozen(generating_model(setting))
        self.start_generator(max_sequences=max_sequences)

    @register(THREE_D_ALL_MICRO_DP, reads=PROMPT_FIELDS, adds=ROLLOUT_FIELDS, in_groups=True)
    def generate_sequences(self, batch: Batch, *, do_sample: bool = True, outlet: Outlet | None = None) -> Fields:
        """As of every actor; then, if a model scores the responses, the generator sleeps."""
        fields = super().generate_sequences(batch, do_sample=do_sample, outlet=outlet)
        if "reward" in self.setting.job.models():
            self.put_generator_to_sleep()
        return fields


class RolloutWorker(Generating, WeightReceiver):
    """One rank of a pool that generates with the weights of an actor in another pool."""

    called = "rollout"

    def __init__(self, setting: WorkerSetting, *, max_sequences: int) -> None:
        """`max_sequences`: the most responses that this rank generates at once."""
        assert setting.layout is not None
        self.setting, self.tokenizer = setting, setting.tokenizer()
        model = inner(generating_model(setting))
        self.config, self.layout, self.costs = model.config, setting.layout, RowCosts(model)
        self.start_generator(max_sequences=max_sequences)


class GeneratingActor(Colocated, WeightSender, OwnReference, TrainedModel):
    """One rank of the actor in RL; it need not be one that generates."""

    def __init__(self, setting: WorkerSetting, *, max_sequences: int) -> None:
        """`max_sequences`: the most responses that this rank generates at once."""
        super().__init__(setting, setting.trainer(generating_model(setting)))
        self.runner = self.trainer
        self.start_generator(max_sequences=max_sequences)

    @property
    def generates(self) -> bool:
        """Whether responses are generated here, not in a pool of their own."""
        return not self.setting.job.generates_apart

    def start_generator(self, *, max_sequences: int) -> None:
        """If it is here."""
        if self.generates:
            super().start_generator(max_sequences=max_sequences)

    def close(self) -> None:
        """End the generation engine, if it is here."""
        if self.generates:
            super().close()

    def put_generator_to_sleep(self) -> None:
        """If it is here."""
        if self.generates:
            super().put_generator_to_sleep()

    @register(ONE_TO_ALL)
    def counters(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors: JSON values, the same on every rank."""
        return {**super().counters(), "policy_version": self.policy_version}

    @register(ONE_TO_ALL)
    def set_counters(self, *, counters: Mapping[str, Any]) -> None:
        """Go back to what `counters` gave."""
        super().set_counters(counters=counters)
        self.policy_version, self.generator_version = counters["policy_version"], -1

    @contextmanager
    def next_policy(self) -> Iterator[None]:
        """The block trains the next policy version; the generator sleeps and the moments are on the device."""
        self.put_generator_to_sleep()
        with self.trainer.offloader.in_use(moments=True):
            yield
        self.policy_version += 1

    @register(
        THREE_D_PROTO,
        reads=("tokens", "attention_mask", "response_mask", "rollout_log_probs", "policy_version"),
        adds=("old_log_probs",),
        phase="scoring",
        row_by_row=True,
    )
    def compute_log_prob(self, batch: Batch) -> Fields:
        """Log-probabilities before the first update, by the trainer's own forward pass: old_log_probs [B, T]."""
        self.begin_scoring(batch)
        old = log_probs_by(self.trainer, batch, temperature=self.setting.job.spec.rollout.temperature)
        if batch.size:  # a group may have none of this rank's rows
            self.warn_of_mismatch(self.mismatch(old, batch.fields))
        return {"old_log_probs": old}

    def begin_scoring(self, batch: Batch) -> None:
        """The generator makes room; its responses should be those of the policy that is to learn from them."""
        self.put_generator_to_sleep()
        if not batch.size:
            return
        behind = self.policy_version - oldest_version(batch.fields)
        behind = behind[behind.isfinite()]  # rows without a response are no older than others
        stalest = int(behind.max()) if len(behind) else 0
        recorder.maximum("staleness", stalest)
        for versions, rows in Counter(behind.int().tolist()).items():
            recorder.add(f"staleness_rows/{versions}", rows)
        if stalest > self.setting.job.spec.rollout.max_staleness:
            newest, version = self.policy_version, self.policy_version - stalest
            recorder.warn("policy_version", f"policy {newest} learns from the responses of policy {version}")

    def mismatch(self, log_probs: Tensor, fields: Fields) -> Tensor:
        """Record how far the trainer's log-probabilities [b, T] are from the generator's: (KL, tokens), float64 [2]."""
        mask, generators = fields["response_mask"], fields["rollout_log_probs"]
        kl = masked_sum(kl_estimate(generators, log_probs, estimator="K3"), mask)
        recorder.mean("kl/rollout", kl, mask.sum())
        recorder.maximum("ratio/rollout_max", keep(log_probs - generators, mask).exp().max())
        return torch.stack([kl.double(), mask.sum().double()])

    def warn_of_mismatch(self, mismatch: Tensor) -> None:
        """Warn where it is more than rounding; `mismatch`: of rows of this rank, with `stream` of a group of them."""
        total, tokens = mismatch.tolist()
        if self._samples_everything() and not total <= tokens * ROLLOUT_KL_LIMIT[self.setting.compute_dtype]:
            message = f"generator and trainer disagree: KL {total / tokens:.2g} a token, which should be about 0"
            recorder.warn("kl/rollout", message)

    def _samples_everything(self) -> bool:
        """Whether responses are drawn from the policy as a whole; else their log-probabilities differ by design."""
        rollout = self.setting.job.spec.rollout
        return rollout.samples_everything and not rollout.max_staleness


def generating_model(setting: WorkerSetting) -> LanguageModel:
    """The model without memory for its weights; ConfigError for a job that it cannot generate in."""
    job, model = setting.job.spec, setting.language_model()
    max_tokens = job.data.max_prompt_tokens + job.data.max_response_tokens
    longest = getattr(inner(model).config, "max_position_embeddings", max_tokens)
    if longest < max_tokens:
        raise ConfigError(
            f"{setting.job.name}: spec.data: maxPromptTokens + maxResponseTokens is {max_tokens}; "
            f"the model {setting.folder} reads {longest} tokens at most"
        )
    if job.training.compile and device_here().type == "cpu":  # vLLM runs there without torch.compile
        raise ConfigError("spec.training.compile: layers cannot be compiled where responses are generated on CPU")
    return model


def oldest_version(fields: Fields) -> Tensor:
    """Policy version [B] of the oldest token of each response; inf where there is none."""
    return fields["policy_version"].masked_fill(fields["response_mask"] == 0, torch.inf).amin(1)


def prompts_in(batch: Batch) -> list[Ids]:
    """The token ids of each row's prompt."""
    lengths = batch["prompt_mask"].sum(1).long().tolist()
    return [row[:length].tolist() for row, length in zip(batch["prompt_ids"], lengths, strict=True)]


def lay_out(prompts: Sequence[Ids], responses: Sequence[Response], *, width: int, pad_token: int) -> dict[str, Tensor]:
    """Prompt and response of each row, contiguous from position 0, padded on the right to `width`."""
    shape = (len(prompts), width)
    tokens = torch.full(shape, pad_token, dtype=torch.int64)
    attention_mask, response_mask = torch.zeros(shape), torch.zeros(shape)
    log_probs, versions = torch.zeros(shape), torch.zeros(shape)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        start, end = len(prompt), len(prompt) + len(response.tokens)
        tokens[row, :end] = torch.tensor([*prompt, *response.tokens])
        attention_mask[row, :end] = 1.0
        response_mask[row, start:end] = torch.tensor(response.written).float() if response.written else 1.0
        log_probs[row, start:end] = torch.tensor(response.log_probs)
        versions[row, start:end] = torch.tensor(response.versions).float()
    return {
        "tokens": tokens,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        "rollout_log_probs": log_probs,
        "policy_version": versions,
        "finished": torch.tensor([float(response.finished) for response in responses]),
    }
