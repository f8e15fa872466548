"""The critic: a value for each response token, trained on the returns by PPO's clipped value loss."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlhf_api.spec.algorithms import ActorCritic
from rlhf_trainer.ops.advantages import gae
from rlhf_trainer.ops.losses import value_loss
from rlhf_trainer.ops.values import shift_values
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.batching import mini_batches
from rlhf_trainer.types import Batch, Fields, Marks, register
from rlhf_trainer.workers.base import TEXT_FIELDS, TrainedModel, WorkerSetting, whole_texts

VALUE_FIELDS = ("values", "token_rewards")
COST_VALUE_FIELDS = ("cost_values", "token_costs")


class CriticWorker(TrainedModel):
    """One rank of the critic."""

    value_fields = VALUE_FIELDS
    """Names of the critic's two fields: its values, and the rewards whose sum the values predict."""
    objective = "value"
    """Name of the critic's loss in the record of a step: loss/<objective>."""

    def __init__(self, setting: WorkerSetting, *, values_by_update: bool = False) -> None:
        """values_by_update: the forward pass of the step's only update gives the values, before the critic learns."""
        super().__init__(setting, setting.trainer(setting.scorer(may_add_head=True)))
        assert isinstance(setting.job.spec.algorithm, ActorCritic)
        self._algorithm = setting.job.spec.algorithm
        self._values_by_update = values_by_update

    @classmethod
    def change_transfers(cls, marks: Marks, *, values_by_update: bool = False, **_: object) -> Marks:
        """Mark `update_critic` as adding the values, if it gives them; `compute_values` then reads and adds nothing."""
        if not values_by_update:
            return marks
        values, rewards = cls.value_fields
        none = replace(marks["compute_values"], reads=(), adds=(), row_by_row=False)
        update = replace(marks["update_critic"], reads=(*TEXT_FIELDS, rewards), adds=(values,))
        return {**marks, "compute_values": none, "update_critic": update}

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=("values",), phase="scoring", row_by_row=True)
    def compute_values(self, batch: Batch) -> Fields:
        """Return values float32 [B, T]: values[b, t] is the critic's value of the state before token t."""
        return self.values_of(batch)

    @register(THREE_D_PROTO, reads=(*TEXT_FIELDS, *VALUE_FIELDS), adds=(), phase="update")
    def update_critic(self, batch: Batch) -> Fields:
        """Make several epochs of mini-batch updates by the clipped value loss."""
        return self.learn(batch)

    def values_of(self, batch: Batch) -> Fields:
        """Return the values [B, T] of the state before each token; no field if the update's own pass gives them."""
        if self._values_by_update:
            return {}
        texts = {name: batch[name] for name in TEXT_FIELDS}
        return {self.value_fields[0]: self.trainer.infer(texts, whole_texts, _values)}

    def learn(self, batch: Batch) -> Fields:
        """Make all updates of a step; return the values [B, T] before the updates if `compute_values` gave none.

        Rows without a trained response have the values 0.
        """
        training = self.setting.job.spec.training
        trained = (batch["response_mask"] > 0).any(1)
        values = torch.zeros_like(batch["response_mask"])
        with self.trainer.offloader.in_use(moments=True):
            for chosen in mini_batches(trained, batch, training, self.trainer.mesh, size=training.mini_batch_size):
                values[chosen] = self._update(batch, chosen)
        return {self.value_fields[0]: values} if self._values_by_update else {}

    def _update(self, batch: Batch, chosen: Tensor) -> Tensor:
        """Make one optimizer step on the chosen rows; return their values before the first step."""
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
        """Return cost_values float32 [B, T]: the expected cost of the response from the state before token t on."""
        return self.values_of(batch)

    @register(THREE_D_PROTO, reads=(*TEXT_FIELDS, *COST_VALUE_FIELDS), adds=(), phase="update")
    def update_critic(self, batch: Batch) -> Fields:
        """Make several epochs of mini-batch updates by the clipped value loss."""
        return self.learn(batch)


def _values(output: Tensor, _: Fields) -> Tensor:
    return shift_values(output)
