"""The frozen reference model: its log-probabilities are those of the KL penalty and of DPO."""

from __future__ import annotations

from rlhf_trainer.data.loaders import PairLoader
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.base import TEXT_FIELDS, WorkerSetting, log_probs_by, side_log_probs


class ReferenceWorker:
    """One rank of the reference model."""

    def __init__(self, setting: WorkerSetting) -> None:
        self.setting = setting
        self._model = setting.frozen(setting.language_model())

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=("ref_log_probs",), phase="scoring")
    def compute_log_prob(self, batch: Batch) -> Fields:
        """ref_log_probs float32 [B, T] of the response tokens (`compute_ref_log_prob` of HybridFlow Table 4)."""
        temperature = self.setting.job.spec.rollout.temperature
        return {"ref_log_probs": log_probs_by(self._model, batch, temperature=temperature)}

    @register(THREE_D_PROTO, reads=PairLoader.fields, adds=("ref_chosen", "ref_rejected"), phase="scoring")
    def compute_pair_log_prob(self, batch: Batch) -> Fields:
        """ref_chosen and ref_rejected float32 [B]: of the whole responses."""
        return {f"ref_{side}": side_log_probs(self._model, batch, side) for side in ("chosen", "rejected")}
