"""The critic: a value for each response token, trained on the returns by PPO's clipped value loss."""

from __future__ import annotations

from torch import Tensor, nn

from rlhf_api.algorithms import ActorCritic
from rlhf_trainer.ops.log_probs import shift_values
from rlhf_trainer.ops.losses import value_loss
from rlhf_trainer.protocols import DP_PROTO
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import sum_over_ranks
from rlhf_trainer.training.mini_batches import deal
from rlhf_trainer.training.models import load_scorer
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.base import TrainedModel, WorkerSetting, lengths_of

UPDATE_FIELDS = ("tokens", "attention_mask", "response_mask", "values", "returns")


class CriticWorker(TrainedModel):
    """One rank of the critic."""

    def __init__(self, setting: WorkerSetting) -> None:
        model = load_scorer(
            setting.folder,
            seed=setting.job.spec.training.seed,
            trust_remote_code=setting.model.trust_remote_code,
            revision=setting.model.revision,
            path=setting.path,
        )
        super().__init__(setting, setting.trainer(model))
        assert isinstance(setting.job.spec.algorithm, ActorCritic)
        self._algorithm = setting.job.spec.algorithm

    @register(DP_PROTO, reads=("tokens", "attention_mask"), adds=("values",), phase="scoring")
    def compute_values(self, batch: Batch) -> Fields:
        """values float32 [B, T]: values[b, t] is that of the state before token t."""
        return {"values": self.trainer.infer({"tokens": batch["tokens"]}, lengths_of(batch), _values)}

    @register(DP_PROTO, reads=UPDATE_FIELDS, phase="update")
    def update_critic(self, batch: Batch) -> None:
        """Several epochs of mini-batch updates by the clipped value loss."""
        training = self.setting.job.spec.training
        for epoch in range(training.update_epochs):
            count = self.setting.job.mini_batches
            dealt = deal(batch.rows, count=count, seed=training.seed, step=batch.step, epoch=epoch)
            for number in range(count):
                self._update(batch, dealt == number)

    def _update(self, batch: Batch, chosen: Tensor) -> None:
        """One optimizer step on the chosen rows."""
        fields = {name: batch[name][chosen] for name in UPDATE_FIELDS}
        tokens = sum_over_ranks([fields["response_mask"].sum()])[0]
        if not tokens:  # nothing but the padding of a short last batch, on every rank
            return

        def loss(model: nn.Module, micro: Fields) -> Tensor:
            share = value_loss(
                _values(model, micro),
                micro["values"],
                micro["returns"],
                micro["response_mask"],
                clip_eps=self._algorithm.value_clip_range,
                num_tokens=tokens,
            )
            recorder.mean("loss/value", float(share.detach()) * tokens, float(micro["response_mask"].sum()))
            return share

        norm = self.trainer.update(fields, lengths_of(batch)[chosen], loss, step=batch.step)
        recorder.maximum("grad_norm/value", norm)


def _values(model: nn.Module, micro: Fields) -> Tensor:
    return shift_values(model(micro["tokens"]))
