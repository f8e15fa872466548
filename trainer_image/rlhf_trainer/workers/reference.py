"""Frozen reference model: the KL penalty and DPO read its log-probabilities."""

from __future__ import annotations

from rlhf_trainer.data.loaders import PairLoader
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.training.adapters import without_adapter
from rlhf_trainer.training.trainer import ModelRunner
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.base import TEXT_FIELDS, TrainedModel, WorkerSetting, log_probs_by, side_log_probs

REFERENCE_FIELDS, PAIR_REFERENCE_FIELDS = ("ref_log_probs",), ("ref_chosen", "ref_rejected")


class ReferenceWorker:
    """One rank of the reference model."""

    def __init__(self, setting: WorkerSetting) -> None:
        self.setting = setting
        self._model = setting.frozen(setting.language_model())

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=REFERENCE_FIELDS, phase="scoring", row_by_row=True)
    def compute_log_prob(self, batch: Batch) -> Fields:
        """Return ref_log_probs float32 [B, T] of the response tokens (`compute_ref_log_prob` of HybridFlow Table 4)."""
        return ref_log_probs(self._model, self.setting, batch)

    @register(THREE_D_PROTO, reads=PairLoader.fields, adds=PAIR_REFERENCE_FIELDS, phase="scoring")
    def compute_pair_log_prob(self, batch: Batch) -> Fields:
        """Return ref_chosen and ref_rejected float32 [B]: log-probabilities of the whole responses."""
        return ref_pair_log_probs(self._model, batch)


class ActorWithReference(TrainedModel):
    """One rank of an actor that can also be the reference model, by leaving out its LoRA adapter."""

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=REFERENCE_FIELDS, phase="scoring", row_by_row=True)
    def compute_ref_log_prob(self, batch: Batch) -> Fields:
        """Return ref_log_probs, as `ReferenceWorker.compute_log_prob` does, by this model without its adapter."""
        with without_adapter(self.trainer.model.module):
            return ref_log_probs(self.trainer, self.setting, batch)

    @register(THREE_D_PROTO, reads=PairLoader.fields, adds=PAIR_REFERENCE_FIELDS, phase="scoring")
    def compute_ref_pair_log_prob(self, batch: Batch) -> Fields:
        """Return the fields of `ReferenceWorker.compute_pair_log_prob` by this model without its adapter."""
        with without_adapter(self.trainer.model.module):
            return ref_pair_log_probs(self.trainer, batch)


def ref_log_probs(model: ModelRunner, setting: WorkerSetting, batch: Batch) -> Fields:
    """Return ref_log_probs float32 [B, T] of the response tokens by `model`, whose adapter, if any, is left out."""
    return {"ref_log_probs": log_probs_by(model, batch, temperature=setting.job.spec.rollout.temperature)}


def ref_pair_log_probs(model: ModelRunner, batch: Batch) -> Fields:
    """Return ref_chosen and ref_rejected float32 [B]: log-probabilities of whole responses by `model`."""
    return {f"ref_{side}": side_log_probs(model, batch, side) for side in ("chosen", "rejected")}
