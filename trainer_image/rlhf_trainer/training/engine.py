"""Runs one sharded model on this rank: forward passes and optimizer steps over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf_api.spec import Offload, Optimizer
from rlhf_trainer.errors import NumericsError
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import device_here, largest_over_ranks, sum_over_ranks
from rlhf_trainer.training.micro_batches import micro_batches, padding_waste
from rlhf_trainer.training.offload import Residence
from rlhf_trainer.training.state import TrainerState
from rlhf_trainer.types import Fields

COSINE_FLOOR = 0.1
"""Share of the peak learning rate at which the cosine schedule ends."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Some rows of the batch on the device, cut to their longest row."""

    fields: Fields
    """Each field [b, t] or [b]."""
    rows: Tensor
    """int64 [b]: which rows of the given batch these are; empty for a rank that only keeps step with the others."""


class Engine:
    """A model sharded over the ranks of its pool. All ranks call the same methods in the same order."""

    def __init__(
        self,
        model: nn.Module,
        *,
        token_budget: int,
        role: str,
        offload: Offload,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """role: the model's, for measurements; `offload`: what leaves the device while the model is not in use."""
        self.model = model.eval()  # no dropout: an update must see the log-probabilities that scoring saw
        self._token_budget = token_budget
        self.residence = Residence(model, optimizer, offload=offload, role=role)

    def split(self, fields: Fields, lengths: Tensor) -> list[MicroBatch]:
        """Micro-batches of a batch, as many on every rank.

        fields: [B, T] (cut to the longest row of the micro-batch) or [B]; lengths: int64 [B].
        A rank with fewer gets micro-batches of one token whose fields are all 0, so that a masked loss of them is 0.
        """
        groups = micro_batches(lengths, token_budget=self._token_budget)
        recorder.mean("padding/waste", *padding_waste(lengths, groups))
        missing = largest_over_ranks(len(groups)) - len(groups)
        device = device_here()
        micros = []
        for rows in groups:
            width = max(1, int(lengths[rows].max()))
            cut = {name: field[rows, :width] if field.dim() > 1 else field[rows] for name, field in fields.items()}
            micros.append(MicroBatch(fields={name: part.to(device) for name, part in cut.items()}, rows=rows))
        nothing = {name: field.new_zeros((1,) * field.dim(), device=device) for name, field in fields.items()}
        return micros + [MicroBatch(fields=nothing, rows=torch.empty(0, dtype=torch.int64))] * missing

    @torch.no_grad()
    def infer(self, fields: Fields, lengths: Tensor, compute: Callable[[nn.Module, Fields], Tensor]) -> Tensor:
        """`compute(model, micro-batch fields) -> [b, t]` of all rows: float32 [B, T], on the CPU."""
        result = torch.zeros(fields["tokens"].shape, dtype=torch.float32)
        with self.residence.in_use():
            for micro in self.split(fields, lengths):
                output = compute(self.model, micro.fields).float().cpu()
                result[micro.rows, : output.shape[1]] = output[: len(micro.rows)]
        return result


class Trainer(Engine):
    """An engine with an optimizer: AdamW on the float32 shards, clipping, warm-up and a cosine or constant schedule."""

    def __init__(
        self,
        model: nn.Module,
        *,
        token_budget: int,
        optimizer: Optimizer,
        total_steps: int,
        max_skipped_updates: int,
        path: str,
        role: str,
        offload: Offload,
    ) -> None:
        """path: the model's field in the manifest, for messages; role, offload: see `Engine`."""
        self._settings = optimizer
        self._total_steps = total_steps
        self._max_skipped_updates = max_skipped_updates
        self._path = path
        self.skipped_in_a_row = 0
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
        )
        super().__init__(model, token_budget=token_budget, role=role, offload=offload, optimizer=self._optimizer)
        self.state = TrainerState(model, self._optimizer)

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step, from 1: linear warm-up, then constant, or a cosine down to a tenth of the peak."""
        warm = min(1.0, step / self._settings.warmup_steps) if self._settings.warmup_steps else 1.0
        if self._settings.schedule == "Constant":
            return self._settings.learning_rate * warm
        warmup = self._settings.warmup_steps
        done = max(0, step - warmup) / max(1, self._total_steps - warmup)
        cosine = 0.5 * (1.0 + math.cos(math.pi * done))
        return self._settings.learning_rate * warm * (COSINE_FLOOR + (1.0 - COSINE_FLOOR) * cosine)

    def update(
        self, fields: Fields, lengths: Tensor, loss: Callable[[nn.Module, Fields], Tensor], *, step: int
    ) -> float:
        """One optimizer step; returns the gradient norm before clipping, which is not finite if the step was skipped.

        `loss(model, micro-batch fields)` is this rank's share of a loss that is divided by *global* counts, so that the
        gradient is the same for any number of ranks, any micro-batch size and any padding.
        A loss or gradient that is not finite leaves weights and optimizer as they are; NumericsError when that happens
        too often in a row. All ranks see the same.
        """
        with self.residence.in_use(moments=True):
            return self._update(fields, lengths, loss, step=step)

    def _update(
        self, fields: Fields, lengths: Tensor, loss: Callable[[nn.Module, Fields], Tensor], *, step: int
    ) -> float:
        total = 0.0
        for micro in self.split(fields, lengths):
            share = loss(self.model, micro.fields)
            total += float(share.detach())
            torch.autograd.backward(share * dist.get_world_size())  # FSDP2 averages gradients over the ranks
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.max_grad_norm)
        measured = {
            "loss": sum_over_ranks([total])[0],
            "gradient norm": float(norm.full_tensor() if isinstance(norm, DTensor) else norm),
        }
        recorder.add("skipped_updates", 0.0)
        broken = [f"the {name} is {value}" for name, value in measured.items() if not math.isfinite(value)]
        if broken:
            self._skip(broken[0], step=step)
        else:
            self._step(step)
        self._optimizer.zero_grad()
        return measured["gradient norm"]

    def _step(self, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self._optimizer.step()
        self.skipped_in_a_row = 0

    def _skip(self, reason: str, *, step: int) -> None:
        """Count an update that is not made; NumericsError when it is one too many."""
        self.skipped_in_a_row += 1
        recorder.add("skipped_updates", float(dist.get_rank() == 0))  # the record sums over the ranks
        if self.skipped_in_a_row > self._max_skipped_updates:
            raise NumericsError(
                f"{self._path}: step {step}: {reason}, and {self.skipped_in_a_row} updates in a row failed, "
                f"more than the {self._max_skipped_updates} of spec.training.maxSkippedUpdates; "
                f"a lower optimizer.learningRate ({self._settings.learning_rate:g}) is the usual remedy"
            )
        recorder.warn(f"skipped_updates {self._path}", f"{self._path}: {reason}, so an update was skipped")
