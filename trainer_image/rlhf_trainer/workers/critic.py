"""The critic: a value for each response token, trained on the returns by PPO's clipped value loss."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_api.spec.algorithms import ActorCritic
from rlhf_trainer.ops.advantages import gae
from rlhf_trainer.ops.losses import value_loss
from rlhf_trainer.ops.values import shift_values
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.batching import mini_batches
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.base import TEXT_FIELDS, TrainedModel, WorkerSetting, whole_texts

VALUE_FIELDS = ("values", "token_rewards")
COST_VALUE_FIELDS = ("cost_values", "token_costs")


class CriticWorker(TrainedModel):
    """One rank of the critic."""

    value_fields = VALUE_FIELDS
    """The fields of its values and of what they foresee."""
    objective = "value"
    """What its loss is recorded as: loss/<objective>."""

    def __init__(self, setting: WorkerSetting) -> None:
        super().__init__(setting, setting.trainer(setting.scorer(may_add_head=True)))
        assert isinstance(setting.job.spec.algorithm, ActorCritic)
        self._algorithm = setting.job.spec.algorithm

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=("values",), phase="scoring", row_by_row=True)
    def compute_values(self, batch: Batch) -> Fields:
        """values float32 [B, T]: values[b, t] is that of the state before token t."""
        return {"values": self.values_of(batch)}

    @register(THREE_D_PROTO, reads=(*TEXT_FIELDS, *VALUE_FIELDS), adds=(), phase="update")
    def update_critic(self, batch: Batch) -> Fields:
        """Several epochs of mini-batch updates by the clipped value loss."""
        self.learn(batch)
        return {}

    def values_of(self, batch: Batch) -> Tensor:
        """The value [B, T] of the state before each token."""
        return self.trainer.infer({name: batch[name] for name in TEXT_FIELDS}, whole_texts, _values)

    def learn(self, batch: Batch) -> Tensor:
        """All updates of a step; returns the values [B, T] before them, 0 of rows that are not learned from."""
        training = self.setting.job.spec.training
        trained = (batch["response_mask"] > 0).any(1)
        values = torch.zeros_like(batch["response_mask"])
        with self.trainer.offloader.in_use(moments=True):
            for chosen in mini_batches(trained, batch, training, self.trainer.mesh, size=training.mini_batch_size):
                values[chosen] = self._update(batch, chosen)
        return values

    def _update(self, batch: Batch, chosen: Tensor) -> Tensor:
        """One optimizer step on the chosen rows; returns their values before the step's first one."""
        values, rewards = self.value_fields
        names = [name for name in (*TEXT_FIELDS, values, rewards) if name in batch.fields]
        fields = {name: batch[name][chosen] for name in names}
        tokens = self.trainer.mesh.sum([fields["response_mask"].sum()])[0]
        algorithm = self._algorithm

        def loss(output: Tensor, micro: Fields) -> tuple[Tensor, Tensor]:
            found, mask = _values(output, micro), micro["response_mask"]
            old = micro[values] if values in micro else found.detach()
            _, returns = gae(micro[rewards], old, mask, gamma=algorithm.discount, lam=algorithm.gae_lambda)
            share = value_loss(found, old, returns, mask, clip_eps=algorithm.value_clip_range, num_tokens=tokens)
            recorder.mean(f"loss/{self.objective}", share.detach().double() * tokens, mask.sum())
            return share, old

        if values in fields:
            norm = self.trainer.update(fields, whole_texts, lambda *given: loss(*given)[0], step=batch.step)
            before = fields[values]
        else:
            norm, before = self.trainer.update_and_infer(fields, whole_texts, loss, step=batch.step)
        recorder.maximum(f"grad_norm/{self.objective}", norm)
        return before


class CostCriticWorker(CriticWorker):
    """One rank of a critic of the costs (Safe RLHF)."""

    value_fields = COST_VALUE_FIELDS
    objective = "cost_value"

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=("cost_values",), phase="scoring", row_by_row=True)
    def compute_values(self, batch: Batch) -> Fields:
        """cost_values float32 [B, T]: the expected cost of the response from the state before token t on."""
        return {"cost_values": self.values_of(batch)}

    @register(THREE_D_PROTO, reads=(*TEXT_FIELDS, *COST_VALUE_FIELDS), adds=(), phase="update")
    def update_critic(self, batch: Batch) -> Fields:
        """Several epochs of mini-batch updates by the clipped value loss."""
        self.learn(batch)
        return {}


class SingleUpdateCriticWorker(CriticWorker):
    """A critic with one update a step: the values are those of its forward pass, before it learns."""

    @register(THREE_D_PROTO, adds=(), phase="scoring")
    def compute_values(self, batch: Batch) -> Fields:  # noqa: ARG002
        """No field, for `update_critic` finds them."""
        return {}

    @register(THREE_D_PROTO, reads=(*TEXT_FIELDS, "token_rewards"), adds=("values",), phase="update")
    def update_critic(self, batch: Batch) -> Fields:
        """values float32 [B, T], and one update by the value loss."""
        return {"values": self.learn(batch)}


class SingleUpdateCostCriticWorker(CostCriticWorker):
    """As `SingleUpdateCriticWorker`, of the costs."""

    @register(THREE_D_PROTO, adds=(), phase="scoring")
    def compute_values(self, batch: Batch) -> Fields:  # noqa: ARG002
        """No field, for `update_critic` finds them."""
        return {}

    @register(THREE_D_PROTO, reads=(*TEXT_FIELDS, "token_costs"), adds=("cost_values",), phase="update")
    def update_critic(self, batch: Batch) -> Fields:
        """cost_values float32 [B, T], and one update by the value loss."""
        return {"cost_values": self.learn(batch)}


def _values(output: Tensor, _: Fields) -> Tensor:
    return shift_values(output)
