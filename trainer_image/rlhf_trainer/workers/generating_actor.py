"""Base class of RL actors, without a loss: it generates responses, computes log-probabilities and sends weights."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rlhf_api.spec.algorithms import Estimator
from rlhf_trainer.expert_rows import ROUTED
from rlhf_trainer.hybrid_engine.hybrid_engine import Span
from rlhf_trainer.hybrid_engine.weight_store import WeightPublisher
from rlhf_trainer.ops.kl import kl_estimate
from rlhf_trainer.ops.masks import keep, masked_sum
from rlhf_trainer.ops.rollout_correction import response_quarters
from rlhf_trainer.protocols import ONE_TO_ALL, THREE_D_ALL_MICRO_DP, THREE_D_PROTO
from rlhf_trainer.row_groups import Outlet
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.routing import RoutingReplay
from rlhf_trainer.types import PARENTS, Batch, Fields, Marks, register
from rlhf_trainer.workers.base import TEXT_FIELDS, WorkerSetting, log_probs_by, text_fields
from rlhf_trainer.workers.reference import ActorWithReference
from rlhf_trainer.workers.rollout import (
    PROMPT_FIELDS,
    ROLLOUT_FIELDS,
    Generation,
    generating_model,
    generation_in_place,
    oldest_version,
    turn_transfers,
)
from rlhf_trainer.workers.weight_links import InPlaceWeights, WeightSender

ROLLOUT_KL_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Largest KL per token between trainer and generator that rounding can explain, by compute type."""
ROUTING_LIMIT = {torch.float32: 0.01, torch.bfloat16: 0.5}
"""Largest share of experts that differ by rounding alone between trainer and generator, by compute type."""
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
OLD = ("old_log_probs",)
SCORED_FIELDS = (*TEXT_FIELDS, "rollout_log_probs", "policy_version")
OldLogProbs = Literal["Pass", "Update", "Generator"]
"""Source of the old log-probabilities: a forward pass; the pass of the step's only update; or the generator."""


class GeneratorWorker:
    """One rank of a model that generates and is not trained."""

    def __init__(self, setting: WorkerSetting, *, max_sequences: int) -> None:
        """`max_sequences`: the most responses that this rank generates at once."""
        self._runner = setting.frozen(generating_model(setting))
        found = generation_in_place(setting, setting.tokenizer(), self._runner, max_sequences)
        self.generation, self._weights = found
        self._is_scored = "reward" in setting.job.models()

    @classmethod
    def change_transfers(cls, marks: Marks, *, setting: WorkerSetting, **_: object) -> Marks:
        """Declare the fields of episodes and the experts of tokens, if the job has any."""
        return turn_transfers(marks, setting)

    @register(THREE_D_ALL_MICRO_DP, reads=PROMPT_FIELDS, adds=ROLLOUT_FIELDS, in_groups=True)
    def generate_sequences(self, batch: Batch, *, do_sample: bool = True, outlet: Outlet | None = None) -> Fields:
        """Generate as `GeneratingActor` does; then free the engine's memory if the job also has a reward model."""
        self._weights.bring(0)
        fields = self.generation.generate(batch, do_sample=do_sample, outlet=outlet)
        if self._is_scored:
            self._weights.put_engine_to_sleep()
        return fields

    def close(self) -> None:
        """End this rank's generation engine."""
        self.generation.close()


class GeneratingActor(ActorWithReference):
    """One rank of the actor in RL; another pool or servers may generate its responses."""

    def __init__(self, setting: WorkerSetting, *, max_sequences: int, old_log_probs: OldLogProbs = "Pass") -> None:
        """`max_sequences`: the most responses that this rank generates at once."""
        super().__init__(setting, setting.trainer(generating_model(setting)))
        self._old_log_probs = old_log_probs
        self.policy_version = 0
        """Number of steps that have trained the current weights."""
        self.generation: Generation | None = None
        self._weights: InPlaceWeights | None = None
        if not setting.job.generates_apart:
            found = generation_in_place(setting, self.tokenizer, self.trainer, max_sequences)
            self.generation, self._weights = found
        self._sender = WeightSender(setting, self.trainer)
        self._publisher: WeightPublisher | None = None
        if setting.job.spec.rollout.weight_store:
            model, dtype = self.trainer.model, setting.compute_dtype
            self._publisher = WeightPublisher(setting.job, model, dtype, self.write_config)
        self._routing: RoutingReplay | None = None
        if setting.replays_routing:
            mesh = self.trainer.mesh
            tensor = mesh.coordinate("tensor"), mesh.layout.tensor
            self._routing = RoutingReplay(self.trainer.model.module, tensor=tensor)
        self._knows_routing = False
        """Whether the experts of generator and trainer have been compared once with the same weights."""

    @classmethod
    def change_transfers(
        cls, marks: Marks, *, setting: WorkerSetting, old_log_probs: OldLogProbs = "Pass", **_: object
    ) -> Marks:
        """Declare that `generate_sequences` gives episodes, if responses have several turns and this actor generates.

        Without a forward pass `compute_log_prob` reads no text; it adds at most the generator's log-probabilities.
        """
        if not setting.job.generates_apart:
            marks = turn_transfers(marks, setting)
        if old_log_probs == "Pass":
            return marks
        is_given = old_log_probs == "Generator"
        reads = ("response_mask", *("rollout_log_probs",) * is_given, "policy_version")
        adds = OLD * is_given
        known = replace(marks["compute_log_prob"], reads=reads, reads_if_there=(), adds=adds, row_by_row=False)
        return {**marks, "compute_log_prob": replace(known, phase="reshard")}

    @register(THREE_D_ALL_MICRO_DP, reads=PROMPT_FIELDS, adds=ROLLOUT_FIELDS, in_groups=True)
    def generate_sequences(self, batch: Batch, *, do_sample: bool = True, outlet: Outlet | None = None) -> Fields:
        """Sample a response to each prompt (HybridFlow Table 4); the response of row r depends on (seed, step, r) only.

        On a GPU this needs `rollout.batchInvariant`; without it, other responses of the batch can change the rounding.
        Without `do_sample` each token is the likeliest one. outlet: receives each row when its response ends.
        Adds tokens int64 [B, T], attention_mask and response_mask [B, T], rollout_log_probs [B, T], finished [B],
        sampled [B] (0 without `do_sample`) and policy_version [B, T]: how many steps have trained the weights that
        wrote a token.
        With turns each row is an episode: response_mask is 1 on the tokens that the model wrote. Episodes add
        turn_rewards [B, T], the environment's reward for a turn on the turn's last token, and played [B]: 0 where the
        environment failed, and nothing is learned from the row.
        """
        assert self.generation is not None, "another pool generates"
        self.reshard()
        return self.generation.generate(batch, do_sample=do_sample, outlet=outlet)

    def reshard(self) -> None:
        """Give the engine in this process the weights of the current policy version, unless the engine has them."""
        assert self._weights is not None, "another pool generates"
        self._weights.bring(self.policy_version)

    def put_generator_to_sleep(self) -> None:
        """Free cache and weights of the generation engine in this process, if there is one."""
        if self._weights:
            self._weights.put_engine_to_sleep()

    def close(self) -> None:
        """End the generation engine in this process, if there is one."""
        if self.generation:
            self.generation.close()

    @register(ONE_TO_ALL)
    def span_pools(self, *, span: Span) -> None:
        """Join the torch.distributed group of the actor's ranks and of all ranks that generate."""
        self._sender.span_pools(span)

    def abort_exchange(self) -> None:
        """End the exchange of weights that this rank is in, from another thread; `send_weights` then fails."""
        self._sender.exchange.abort()

    @register(ONE_TO_ALL)
    def send_weights(self) -> None:
        """Send the weights of the current policy version, unless all generators have them."""
        self._sender.send(self.policy_version)

    @register(ONE_TO_ALL, phase="reshard")
    def publish_weights(self, *, waits: bool) -> None:
        """Write the weights to `rollout.weightStore` in a thread; waits: return when readers can find them there."""
        assert self._publisher is not None, "the job has no store of weights"
        with self.trainer.offloader.in_use():
            self._publisher.publish(self.policy_version, waits=waits)

    @register(
        THREE_D_PROTO, reads=SCORED_FIELDS, reads_if_there=(PARENTS, ROUTED), adds=OLD, phase="scoring", row_by_row=True
    )
    def compute_log_prob(self, batch: Batch) -> Fields:
        """Return old_log_probs [B, T], before the first update, by the source `OldLogProbs`.

        With the source Update there is no field: the update's forward pass gives the log-probabilities later.
        """
        self.begin_scoring(batch)
        if self._old_log_probs != "Pass":
            return {"old_log_probs": batch["rollout_log_probs"]} if self._old_log_probs == "Generator" else {}
        names, temperature = text_fields(batch.fields, ROUTED), self.setting.job.spec.rollout.temperature
        with self.routing_measured():
            old = log_probs_by(self.trainer, batch, names, temperature=temperature)
        if batch.size:  # a group may have none of this rank's rows
            self.warn_of_mismatch(self.mismatch(old, batch.fields))
        return {"old_log_probs": old}

    def begin_scoring(self, batch: Batch) -> None:
        """Free the generation engine's memory; warn of responses that are staler than `Job.max_staleness`."""
        self.put_generator_to_sleep()
        if not batch.size:
            return
        behind = self.policy_version - oldest_version(batch.fields)
        behind = behind[behind.isfinite()]  # the version of a row without a response is inf
        stalest = int(behind.max()) if len(behind) else 0
        recorder.maximum("staleness", stalest)
        for versions, rows in Counter(behind.int().tolist()).items():
            recorder.add(f"staleness_rows/{versions}", rows)
        if stalest > self.setting.job.max_staleness:
            newest, version = self.policy_version, self.policy_version - stalest
            recorder.warn("policy_version", f"policy {newest} learns from the responses of policy {version}")

    def routing_measured(self) -> AbstractContextManager[None]:
        """Measure in the `with` block how often generator and trainer choose different experts for a token.

        EnvironmentProblem if rounding does not explain the share in the first block, when both have equal weights.
        """
        if not self._routing:
            return nullcontext()
        is_known, self._knows_routing = self._knows_routing or self.setting.job.max_staleness > 0, True
        return self._routing.measured(limit=1.0 if is_known else ROUTING_LIMIT[self.setting.compute_dtype])

    def mismatch(self, log_probs: Tensor, fields: Fields) -> Tensor:
        """Record how far log-probabilities [b, T] are from the generator's; return (KL, tokens), float64 [2]."""
        mask, generators = fields["response_mask"], fields["rollout_log_probs"]
        by_estimator = {each: kl_estimate(generators, log_probs, estimator=each) for each in ESTIMATORS}
        kl = masked_sum(by_estimator["K3"], mask)
        recorder.mean("kl/rollout", kl, mask.sum())
        recorder.mean("kl/rollout_k1", masked_sum(by_estimator["K1"], mask), mask.sum())
        recorder.mean("kl/rollout_k2", masked_sum(by_estimator["K2"], mask), mask.sum())
        for number, quarter in enumerate(response_quarters(mask), 1):
            recorder.mean(f"kl_rollout_quarter/{number}", masked_sum(by_estimator["K3"], quarter), quarter.sum())
        recorder.maximum("ratio/rollout_max", keep(log_probs - generators, mask).exp().max())
        return torch.stack([kl.double(), mask.sum().double()])

    def warn_of_mismatch(self, mismatch: Tensor) -> None:
        """Warn if the mismatch between generator and trainer, (KL, tokens), is larger than rounding explains."""
        total, tokens = mismatch.tolist()
        rollout = self.setting.job.spec.rollout
        by_design = self.setting.job.max_staleness or rollout.is_rounded or not rollout.samples_everything
        if not by_design and not total <= tokens * ROLLOUT_KL_LIMIT[self.setting.compute_dtype]:
            message = f"generator and trainer disagree: KL {total / tokens:.2g} a token, which should be about 0"
            recorder.warn("kl/rollout", message)

    @register(ONE_TO_ALL)
    def counters(self) -> dict[str, Any]:
        """Return the state that a checkpoint holds besides tensors: JSON values, the same on every rank."""
        return {**super().counters(), "policy_version": self.policy_version}

    @register(ONE_TO_ALL)
    def set_counters(self, *, counters: Mapping[str, Any]) -> None:
        """Restore the state that `counters` returned; all generators then need the weights again."""
        super().set_counters(counters=counters)
        self.policy_version, self._sender.sent_version = counters["policy_version"], -1
        if self._weights:
            self._weights.held_version = -1

    @contextmanager
    def next_policy(self) -> Iterator[None]:
        """Train the next policy version in the `with` block, with the engine asleep and the moments on the device."""
        self.put_generator_to_sleep()
        with self.trainer.offloader.in_use(moments=True):
            yield
        self.policy_version += 1
