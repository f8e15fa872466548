"""The critic: a value for each response token, trained on the returns by PPO's clipped value loss."""

from dataclasses import replace

import torch
from torch import Tensor

from rlhf_api.names import Role
from rlhf_api.spec.algorithms import ActorCritic
from rlhf_trainer.ops.advantages import gae, shift_values
from rlhf_trainer.ops.losses import value_loss
from rlhf_trainer.ops.masks import masked_sum
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.batching import mini_batches
from rlhf_trainer.training.fused_updates import Updates, run_alone
from rlhf_trainer.types import Batch, Fields, Marks, register
from rlhf_trainer.workers.base import TEXT_FIELDS, TrainedModel, WorkerSetting, whole_texts

VALUE_FIELDS = (*TEXT_FIELDS, "values", "token_rewards")


class CriticWorker(TrainedModel):
    """One rank of a critic, which predicts the sum of rewards or, in the role `cost_critic` (Safe RLHF), of costs."""

    def __init__(self, setting: WorkerSetting, *, values_by_update: bool = False) -> None:
        """values_by_update: the forward pass of the step's only update gives the values, before the critic learns."""
        super().__init__(setting, setting.trainer(setting.scorer(may_add_head=True)))
        assert isinstance(setting.job.spec.algorithm, ActorCritic)
        self._algorithm = setting.job.spec.algorithm
        self._values_by_update = values_by_update
        self._values, self._rewards = value_fields(setting.role)

    @classmethod
    def change_transfers(
        cls, marks: Marks, *, setting: WorkerSetting, values_by_update: bool = False, **_: object
    ) -> Marks:
        """Declare which method adds the values: `compute_values` or, with `values_by_update`, `update_critic`."""
        values, rewards = value_fields(setting.role)
        compute = replace(marks["compute_values"], adds=(values,))
        update = replace(marks["update_critic"], reads=(*TEXT_FIELDS, values, rewards))
        if values_by_update:
            compute = replace(compute, reads=(), adds=(), row_by_row=False)
            update = replace(update, reads=(*TEXT_FIELDS, rewards), adds=(values,))
        if setting.fuses_updates:
            update = replace(update, reads=())
        return {**marks, "compute_values": compute, "update_critic": update}

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=("values",), phase="scoring", row_by_row=True)
    def compute_values(self, batch: Batch) -> Fields:
        """Return values (or cost_values) float32 [B, T]: values[b, t] is the value of the state before token t.

        Returns no field if the forward pass of `update_critic` gives the values.
        """
        if self._values_by_update:
            return {}
        texts = {name: batch[name] for name in TEXT_FIELDS}
        return {self._values: self.trainer.infer(texts, whole_texts, lambda output, _: shift_values(output))}

    @register(THREE_D_PROTO, reads=VALUE_FIELDS, adds=(), phase="update")
    def update_critic(self, batch: Batch) -> Fields:
        """Make several epochs of mini-batch updates by the clipped value loss.

        Returns the values [B, T] before the updates if `compute_values` gave none. Rows without a trained response have
        the values 0. If the updates are fused, `update_actor` makes them (`updates`).
        """
        if self.setting.fuses_updates:
            return {}
        values = run_alone(self.updates(batch))
        return {self._values: values} if self._values_by_update else {}

    def updates(self, batch: Batch) -> Updates[Tensor]:
        """Make the updates of `update_critic`; return the values [B, T] before them."""
        training = self.setting.job.spec.training
        trained = (batch["response_mask"] > 0).any(1)
        values = torch.zeros_like(batch["response_mask"])
        with self.trainer.offloader.in_use(moments=True):
            for chosen in mini_batches(trained, batch, training, self.trainer.mesh, size=training.mini_batch_size):
                values[chosen] = yield from self._update(batch, chosen)
        return values

    def _update(self, batch: Batch, chosen: Tensor) -> Updates[Tensor]:
        """Make one optimizer step on the rows `chosen`; return their values [rows, T] before the step's updates."""
        names = [name for name in (*TEXT_FIELDS, self._values, self._rewards) if name in batch.fields]
        fields = {name: batch[name][chosen] for name in names}
        tokens = self.trainer.mesh.sum([fields["response_mask"].sum()])[0]
        algorithm, measured = self._algorithm, self._values.removesuffix("s")
        outputs: list[Tensor] | None = None if self._values in fields else []

        def loss(output: Tensor, micro: Fields) -> Tensor:
            found, mask = shift_values(output), micro["response_mask"]
            old = found.detach() if outputs is not None else micro[self._values]
            if outputs is not None:
                outputs.append(old)
            _, returns = gae(micro[self._rewards], old, mask, gamma=algorithm.discount, lam=algorithm.gae_lambda)
            share = value_loss(found, old, returns, mask, clip_eps=algorithm.value_clip_range, num_tokens=tokens)
            recorder.mean(f"loss/{measured}", share.detach().double() * tokens, mask.sum())
            _measure_error(measured, returns - old, returns, mask)
            return share

        norm, before = yield from self.trainer.updating(fields, whole_texts, loss, step=batch.step, outputs=outputs)
        recorder.maximum(f"grad_norm/{measured}", norm)
        return fields[self._values] if before is None else before


def _measure_error(measured: str, errors: Tensor, returns: Tensor, mask: Tensor) -> None:
    """Record the moments of returns and of the values' errors, both [B, T], for `telemetry.explained_variance`."""
    tokens = mask.sum()
    recorder.mean(f"errors/{measured}", masked_sum(errors, mask), tokens)
    recorder.mean(f"errors_square/{measured}", masked_sum(errors.square(), mask), tokens)
    recorder.mean(f"returns/{measured}", masked_sum(returns, mask), tokens)
    recorder.mean(f"returns_square/{measured}", masked_sum(returns.square(), mask), tokens)


def value_fields(role: Role) -> tuple[str, str]:
    """Return the names of a critic's two fields: its values, and the rewards whose sum the values predict."""
    return ("cost_values", "token_costs") if role == "cost_critic" else ("values", "token_rewards")
