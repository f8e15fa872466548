"""The critic: a value for each response token, trained on the returns by PPO's clipped value loss."""

from __future__ import annotations

from torch import Tensor

from rlhf_api.algorithms import ActorCritic
from rlhf_trainer.ops.losses import value_loss
from rlhf_trainer.ops.values import shift_values
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.mini_batches import mini_batches
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.base import TEXT_FIELDS, TrainedModel, WorkerSetting, whole_texts

VALUE_FIELDS = ("values", "returns")
COST_VALUE_FIELDS = ("cost_values", "cost_returns")


class CriticWorker(TrainedModel):
    """One rank of the critic."""

    value_fields = VALUE_FIELDS
    """The fields of its values and of their targets."""
    objective = "value"
    """What its loss is recorded as: loss/<objective>."""

    def __init__(self, setting: WorkerSetting) -> None:
        super().__init__(setting, setting.trainer(setting.scorer(may_add_head=True)))
        assert isinstance(setting.job.spec.algorithm, ActorCritic)
        self._algorithm = setting.job.spec.algorithm

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=("values",), phase="scoring")
    def compute_values(self, batch: Batch) -> Fields:
        """values float32 [B, T]: values[b, t] is that of the state before token t."""
        return {"values": self.values_of(batch)}

    @register(THREE_D_PROTO, reads=(*TEXT_FIELDS, *VALUE_FIELDS), phase="update")
    def update_critic(self, batch: Batch) -> None:
        """Several epochs of mini-batch updates by the clipped value loss."""
        self.learn(batch)

    def values_of(self, batch: Batch) -> Tensor:
        """The value [B, T] of the state before each token."""
        return self.trainer.infer({name: batch[name] for name in TEXT_FIELDS}, whole_texts, _values)

    def learn(self, batch: Batch) -> None:
        """All updates of a step."""
        training = self.setting.job.spec.training
        trained = (batch["response_mask"] > 0).any(1)
        with self.trainer.offloader.in_use(moments=True):
            for chosen in mini_batches(trained, batch, training, self.trainer.mesh, size=training.mini_batch_size):
                self._update(batch, chosen)

    def _update(self, batch: Batch, chosen: Tensor) -> None:
        """One optimizer step on the chosen rows."""
        fields = {name: batch[name][chosen] for name in (*TEXT_FIELDS, *self.value_fields)}
        tokens = self.trainer.mesh.sum([fields["response_mask"].sum()])[0]
        values, returns = self.value_fields

        def loss(output: Tensor, micro: Fields) -> Tensor:
            share = value_loss(
                _values(output, micro),
                micro[values],
                micro[returns],
                micro["response_mask"],
                clip_eps=self._algorithm.value_clip_range,
                num_tokens=tokens,
            )
            recorder.mean(f"loss/{self.objective}", share.detach().double() * tokens, micro["response_mask"].sum())
            return share

        norm = self.trainer.update(fields, whole_texts, loss, step=batch.step)
        recorder.maximum(f"grad_norm/{self.objective}", norm)


class CostCriticWorker(CriticWorker):
    """One rank of a critic of the costs (Safe RLHF)."""

    value_fields = COST_VALUE_FIELDS
    objective = "cost_value"

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=("cost_values",), phase="scoring")
    def compute_values(self, batch: Batch) -> Fields:
        """cost_values float32 [B, T]: the expected cost of the response from the state before token t on."""
        return {"cost_values": self.values_of(batch)}

    @register(THREE_D_PROTO, reads=(*TEXT_FIELDS, *COST_VALUE_FIELDS), phase="update")
    def update_critic(self, batch: Batch) -> None:
        """Several epochs of mini-batch updates by the clipped value loss."""
        self.learn(batch)


def _values(output: Tensor, _: Fields) -> Tensor:
    return shift_values(output)
