"""Actor of RL without its loss: it generates responses and sends its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlhf_trainer.data.loaders import PairLoader
from rlhf_trainer.hybrid_engine.hybrid_engine import Span
from rlhf_trainer.protocols import ONE_TO_ALL, THREE_D_ALL_MICRO_DP, THREE_D_PROTO
from rlhf_trainer.row_groups import Outlet
from rlhf_trainer.training.adapters import without_adapter
from rlhf_trainer.types import Batch, Fields, Marks, register
from rlhf_trainer.workers.base import TEXT_FIELDS, TrainedModel, WorkerSetting
from rlhf_trainer.workers.reference import PAIR_REFERENCE_FIELDS, REFERENCE_FIELDS, ref_log_probs, ref_pair_log_probs
from rlhf_trainer.workers.rollout import (
    PROMPT_FIELDS,
    ROLLOUT_FIELDS,
    Generation,
    generating_model,
    generation_in_place,
    turn_transfers,
)
from rlhf_trainer.workers.weight_links import InPlaceWeights, WeightSender


class GeneratorWorker:
    """One rank of a model that generates and is not trained."""

    def __init__(self, setting: WorkerSetting, *, max_sequences: int) -> None:
        """`max_sequences`: the most responses that this rank generates at once."""
        self._runner = setting.frozen(generating_model(setting))
        self.generation, self._weights = generation_in_place(
            setting, setting.tokenizer(), self._runner, max_sequences=max_sequences
        )
        self._is_scored = "reward" in setting.job.models()

    @classmethod
    def change_transfers(cls, marks: Marks, *, setting: WorkerSetting, **_: object) -> Marks:
        """Mark `generate_sequences` as reading and adding the fields of episodes, if the job has several turns."""
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


class GeneratingActor(TrainedModel):
    """One rank of the actor in RL; another pool or servers may generate its responses."""

    def __init__(self, setting: WorkerSetting, *, max_sequences: int) -> None:
        """`max_sequences`: the most responses that this rank generates at once."""
        super().__init__(setting, setting.trainer(generating_model(setting)))
        self.policy_version = 0
        """Number of steps that have trained the current weights."""
        self.generation: Generation | None = None
        self._weights: InPlaceWeights | None = None
        if not setting.job.generates_apart:
            self.generation, self._weights = generation_in_place(
                setting, self.tokenizer, self.trainer, max_sequences=max_sequences
            )
        self._sender = WeightSender(setting, self.trainer)

    @classmethod
    def change_transfers(cls, marks: Marks, *, setting: WorkerSetting, **_: Any) -> Marks:
        """Mark `generate_sequences` as giving episodes, if the job has several turns and this actor generates."""
        return marks if setting.job.generates_apart else turn_transfers(marks, setting)

    @register(THREE_D_ALL_MICRO_DP, reads=PROMPT_FIELDS, adds=ROLLOUT_FIELDS, in_groups=True)
    def generate_sequences(self, batch: Batch, *, do_sample: bool = True, outlet: Outlet | None = None) -> Fields:
        """Sample a response to each prompt (HybridFlow Table 4); the response of row r depends on (seed, step, r) only.

        Without `do_sample` each token is the likeliest one. outlet: gets the rows as they end.
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
        """Give the engine beside the model the weights of the current policy version, unless it has them."""
        assert self._weights is not None, "another pool generates"
        self._weights.bring(self.policy_version)

    def put_generator_to_sleep(self) -> None:
        """Free cache and weights of the engine beside the model, if there is one."""
        if self._weights:
            self._weights.put_engine_to_sleep()

    def close(self) -> None:
        """End the generation engine beside the model, if there is one."""
        if self.generation:
            self.generation.close()

    @register(ONE_TO_ALL)
    def span_pools(self, *, span: Span) -> None:
        """Join the torch.distributed group of the actor's ranks and of all ranks that generate."""
        self._sender.span_pools(span)

    @register(ONE_TO_ALL)
    def send_weights(self) -> None:
        """Send the weights of the current policy version, unless all generators have them."""
        self._sender.send(self.policy_version)

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=REFERENCE_FIELDS, phase="scoring", row_by_row=True)
    def compute_ref_log_prob(self, batch: Batch) -> Fields:
        """Compute `ReferenceWorker.compute_log_prob` by this model without its adapter."""
        with without_adapter(self.trainer.model.module):
            return ref_log_probs(self.trainer, self.setting, batch)

    @register(THREE_D_PROTO, reads=PairLoader.fields, adds=PAIR_REFERENCE_FIELDS, phase="scoring")
    def compute_ref_pair_log_prob(self, batch: Batch) -> Fields:
        """Compute `ReferenceWorker.compute_pair_log_prob` by this model without its adapter."""
        with without_adapter(self.trainer.model.module):
            return ref_pair_log_probs(self.trainer, batch)

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
        """Train the next policy version in the block; the generator sleeps and the moments are on the device."""
        self.put_generator_to_sleep()
        with self.trainer.offloader.in_use(moments=True):
            yield
        self.policy_version += 1
