"""Frozen reference model: the KL penalty, DPO and KTO read its log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from rlhf_trainer.data.loaders import LabelledLoader, PairLoader
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.training.adapters import without_adapter
from rlhf_trainer.training.trainer import ModelRunner, Trainer
from rlhf_trainer.types import PARENTS, Batch, Fields, register
from rlhf_trainer.workers.base import TEXT_FIELDS, TrainedModel, WorkerSetting, log_probs_by, side_log_probs

REFERENCE_FIELDS, PAIR_REFERENCE_FIELDS = ("ref_log_probs",), ("ref_chosen", "ref_rejected")


class ReferenceWorker:
    """One rank of the reference model."""

    def __init__(self, setting: WorkerSetting, model: ModelRunner | None = None) -> None:
        """model: the model that the reference shares with the actor; None: a frozen model of its own."""
        self.setting = setting
        self._model = model or setting.frozen(setting.language_model())

    @register(
        THREE_D_PROTO,
        reads=TEXT_FIELDS,
        reads_if_there=(PARENTS,),
        adds=REFERENCE_FIELDS,
        phase="scoring",
        row_by_row=True,
    )
    def compute_log_prob(self, batch: Batch) -> Fields:
        """Return ref_log_probs float32 [B, T] of the response tokens (`compute_ref_log_prob` of HybridFlow Table 4)."""
        temperature = self.setting.job.spec.rollout.temperature
        return {"ref_log_probs": log_probs_by(self._model, batch, temperature=temperature)}

    @register(THREE_D_PROTO, reads=PairLoader.fields, adds=PAIR_REFERENCE_FIELDS, phase="scoring")
    def compute_pair_log_prob(self, batch: Batch) -> Fields:
        """Return ref_chosen and ref_rejected float32 [B]: log-probabilities of the whole responses."""
        return {f"ref_{side}": side_log_probs(self._model, batch, side) for side in ("chosen", "rejected")}

    @register(THREE_D_PROTO, reads=LabelledLoader.mismatched, adds=("ref_mismatched",), phase="scoring")
    def compute_mismatched_log_prob(self, batch: Batch) -> Fields:
        """Return ref_mismatched float32 [B]: log-probabilities of the responses of other rows."""
        return {"ref_mismatched": side_log_probs(self._model, batch, "mismatched")}


def by_actor(method: Callable[[ReferenceWorker, Batch], Fields]) -> Callable[[ActorWithReference, Batch], Fields]:
    """Return a method of `ReferenceWorker` as one of the actor: it calls the actor's model without its adapter."""

    @wraps(method)
    def compute(actor: ActorWithReference, batch: Batch) -> Fields:
        with without_adapter(actor.trainer.model.module):
            return method(ReferenceWorker(actor.setting, actor.trainer), batch)

    return compute


class ActorWithReference(TrainedModel):
    """One rank of an actor that can also be the reference model, by leaving out its LoRA adapter."""

    def __init__(self, setting: WorkerSetting, trainer: Trainer | None = None) -> None:
        super().__init__(setting, trainer or setting.trainer(setting.language_model()))

    compute_ref_log_prob = by_actor(ReferenceWorker.compute_log_prob)
    compute_ref_pair_log_prob = by_actor(ReferenceWorker.compute_pair_log_prob)
    compute_ref_mismatched_log_prob = by_actor(ReferenceWorker.compute_mismatched_log_prob)
