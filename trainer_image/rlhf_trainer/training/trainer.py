"""Forward passes and optimizer steps of one sharded model on this rank."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_api.spec.job_spec import Attention, Kernels, Offload, Optimizer
from rlhf_trainer.device import peak_flops
from rlhf_trainer.errors import NumericsError
from rlhf_trainer.ops.kl import RateController
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.attention import use_attention
from rlhf_trainer.training.balance import ExpertBalance
from rlhf_trainer.training.batching import Bundles, RowAssignment, RowCosts, micro_batches
from rlhf_trainer.training.compression import CompressedSteps
from rlhf_trainer.training.distributed import device_here
from rlhf_trainer.training.fused_updates import UpdatePasses, Updates, run_alone
from rlhf_trainer.training.kernels import use_kernels
from rlhf_trainer.training.model_input import FieldsOnDevice, ModelInput, TokenBatch
from rlhf_trainer.training.models import inner, trained_tie
from rlhf_trainer.training.offload import Offloader
from rlhf_trainer.training.optimizer import GradientSync, ShardedAdamW, clip_gradients, learning_rate
from rlhf_trainer.training.passes import (
    MicroBatch,
    OutputFunction,
    Passes,
    TextsFunction,
    run_stage,
    run_whole,
    sum_tied_gradients,
)
from rlhf_trainer.training.saving import TrainerState
from rlhf_trainer.training.sharding import ShardedModel, trained_parameters
from rlhf_trainer.types import Fields

PASSES = {"scoring": 1.0, "update": 3.0}
"""FLOPs of a phase, in multiples of a forward pass; a backward pass counts as two, recomputed layers do not count."""
BESIDE_FROZEN = 2.0
"""FLOPs of an adapter's update, in multiples of a forward pass; frozen weights have no gradient of their own."""
MIN_PARTS = 4
"""Minimum number of bundles of a rank for load balancing, unless a row is too long, or rows share most tokens."""


class RunnerOptions(TypedDict):
    """Options of a `ModelRunner`."""

    token_budget: int
    """Maximum number of tokens of a micro-batch per context-parallel rank; a longer row is a micro-batch of its own."""
    role: str
    """The model's role, for measurements."""
    offload: Offload
    """Tensors to move to host memory while the model is not in use."""
    attention: Attention
    kernels: NotRequired[Kernels]
    """Kernels of layers and head; default Auto."""
    share_prompts: NotRequired[bool]
    """Whether a prefix that several rows have is computed once; default True."""


class ModelRunner:
    """Forward passes of a model that is cut over the ranks of its pool. All ranks make the same calls in one order."""

    def __init__(
        self, model: ShardedModel, *, optimizer: torch.optim.Optimizer | None = None, **options: Unpack[RunnerOptions]
    ) -> None:
        self.model, self.mesh = model, model.mesh
        use_attention(inner(model.module), options["attention"], device=device_here(), dtype=model.compute_dtype)
        use_kernels(model.module, options.get("kernels", "Auto"), device=device_here())
        self._run: Passes = partial(run_whole, model.module)
        if model.mesh.layout.pipeline > 1:
            self._run = partial(run_stage, model.module, model.mesh, model.compute_dtype)
        self._token_budget = options["token_budget"] * self.mesh.layout.context
        self._share_prompts = options.get("share_prompts", True)
        self.costs = RowCosts(inner(model.module))
        self._peak = peak_flops(model.compute_dtype)
        self.offloader = Offloader(model.module, optimizer, offload=options["offload"], role=options["role"])

    def assign_rows(self, fields: Fields, texts_of: TextsFunction) -> RowAssignment:
        """Assign rows to the data-parallel ranks that compute them, so that all have about the same FLOPs."""
        texts = texts_of(fields)
        part = max(1, int(sum(text.lengths.sum() for text in texts)) // MIN_PARTS)
        bundles = Bundles.of(texts, token_budget=min(self._token_budget, part), share=self._share_prompts)
        costs = bundles.sums(self.costs.of(bundles.lengths) - self.costs.of(bundles.shared))
        return RowAssignment(costs, bundles.of_rows, self.mesh)

    def split(
        self, fields: Fields, texts_of: TextsFunction, *, phase: Literal["scoring", "update"]
    ) -> list[MicroBatch]:
        """Cut the rows of this rank into micro-batches, the same number on every rank, as each runs collectives.

        fields: [B, T] (cut to the micro-batch's longest row) or [B]. A rank with too few micro-batches gets padding
        ones: no text, fields of zeros, so a masked loss of 0. Micro-batches of a pipeline have equally many tokens.
        """
        stages, device, texts, share = self.mesh.layout.pipeline, device_here(), texts_of(fields), self._share_prompts
        lengths = torch.stack([text.lengths for text in texts]).amax(0)
        bundles = Bundles.of(texts, token_budget=self._token_budget, share=share)
        if stages > 1:  # with fewer micro-batches than stages, stages wait for each other
            largest = max(1, -(-int(bundles.tokens.sum()) // stages))
            bundles = Bundles.of(texts, token_budget=min(self._token_budget, largest), share=share)
        self._count(bundles, texts, phase)
        tokens = bundles.tokens
        numbers = micro_batches(tokens, token_budget=self._token_budget, at_least=stages)
        groups = [bundles.rows(each) for each in numbers]
        groups += [torch.empty(0, dtype=torch.int64)] * (self.mesh.largest(len(groups)) - len(groups))
        even = max((int(tokens[each].sum()) for each in numbers), default=1) if stages > 1 else 1
        micros = []
        for rows in groups:
            if len(rows):
                width = max(1, int(lengths[rows].max()))
                cut = {name: field[rows] for name, field in fields.items()}
                part = {name: field[:, :width] if field.dim() > 1 else field for name, field in cut.items()}
            else:  # one row of one token
                shapes = {name: (1, 1, *field.shape[2:])[: field.dim()] for name, field in fields.items()}
                part = {name: field.new_zeros(shapes[name]) for name, field in fields.items()}
            multiple = self.mesh.layout.context * self.mesh.layout.tensor
            given = ModelInput.of(texts_of(part), share=share, at_least=max(1, even), multiple=multiple)
            recorder.mean("padding/waste", float(given.padding), float(given.tokens.numel()))
            computed, whole = float(given.tokens.numel() - given.padding), float(len(given.whole))
            recorder.add("computed_tokens", computed)
            recorder.mean("shared_tokens", max(0.0, whole - computed), whole)  # unshared branches repeat tokens
            if self.mesh.layout.context > 1:
                given = given.part(self.mesh.coordinate("context"), self.mesh.context_group)
            micros.append(MicroBatch(fields=FieldsOnDevice(part, device), given=given.to(device), rows=rows))
        return micros

    def _count(self, bundles: Bundles, texts: Sequence[TokenBatch], phase: str) -> None:
        costs = float((self.costs.of(bundles.lengths) - self.costs.of(bundles.shared)).sum())
        read = sum(float((text.read > 0).sum()) for text in texts if text.read is not None)
        passes = BESIDE_FROZEN if phase == "update" and self.model.adapter else PASSES[phase]
        recorder.add(f"flops/{phase}", passes * self.costs.flops(costs, read))
        recorder.maximum("peak_flops", self._peak)

    @torch.no_grad()
    def infer(
        self, fields: Fields, texts_of: TextsFunction, compute: OutputFunction, *, of_token: tuple[int, ...] = ()
    ) -> Tensor:
        """Run forward passes over all rows; returns the results of `compute` [b, t] as one float32 [B, T] on the CPU.

        T is the width of the widest field. Every stage of a pipeline gets the result. of_token: further dims of the
        results, [b, t, *of_token].
        """
        assignment = self.assign_rows(fields, texts_of)
        computed = assignment.rows(fields)
        with self.offloader.in_use():
            micros = self.split(computed, texts_of, phase="scoring")
            result = _of_rows(computed, micros, self._run(micros, compute, None), of_token)
        return self._back(result, assignment, fields)

    def _back(self, result: Tensor, assignment: RowAssignment, fields: Fields) -> Tensor:
        return assignment.back(self.mesh.from_last_stage(result))[:, : widest(fields).shape[1]]


def widest(fields: Fields) -> Tensor:
    """Return the field of a batch with the most columns."""
    return max((field for field in fields.values() if field.dim() > 1), key=lambda field: field.shape[1])


def _of_rows(
    fields: Fields, micros: Sequence[MicroBatch], outputs: Sequence[Tensor], of_token: tuple[int, ...] = ()
) -> Tensor:
    """Put micro-batches' outputs [b, t] in the order of the fields' rows: [B, T] on the CPU, zeros without outputs."""
    result = torch.zeros((*widest(fields).shape[:2], *of_token), dtype=torch.float32)
    kept = [  # t columns, cut or padded to T
        pad(output[: len(micro.rows)].float(), (0, 0) * len(of_token) + (0, result.shape[1] - output.shape[1]))
        for micro, output in zip(micros, outputs, strict=False)
    ]
    if kept:
        result[torch.cat([micro.rows for micro in micros])] = torch.cat(kept).cpu()
    return result


class Trainer(ModelRunner):
    """A `ModelRunner` with an optimizer: AdamW on float32 shards, gradient clipping, and a learning rate schedule."""

    def __init__(
        self,
        model: ShardedModel,
        *,
        optimizer: Optimizer,
        total_steps: int,
        max_skipped_updates: int,
        path: str,
        router_aux_loss: float = 0.0,
        **options: Unpack[RunnerOptions],
    ) -> None:
        """path: the model's field in the manifest, for error messages; router_aux_loss: see `ExpertBalance`."""
        self._settings, self._total_steps, self._path = optimizer, total_steps, path
        self._max_skipped_updates, self.skipped_in_a_row = max_skipped_updates, 0
        self.rate_factor: RateController | None = None
        """Controller whose value multiplies the scheduled learning rate; None: the schedule alone sets the rate."""
        self._optimizer = ShardedAdamW(trained_parameters(model).values(), optimizer)
        super().__init__(model, optimizer=self._optimizer, **options)
        self.state = TrainerState(model, self._optimizer)
        self._gradients, self._steps = GradientSync(model), CompressedSteps(model, self._optimizer)
        self._balance = ExpertBalance(model.module, model.mesh, coefficient=router_aux_loss)

    def update(self, fields: Fields, texts_of: TextsFunction, loss: OutputFunction, *, step: int) -> float:
        """Take one optimizer step; returns the gradient norm before clipping, not finite if the step was skipped.

        loss: this rank's part of the loss, divided by *global* counts, so that ranks, micro-batches and padding do not
        change the gradient. If the loss or a gradient is not finite, weights and optimizer do not change on any rank;
        NumericsError when that happens more than `max_skipped_updates` times in a row.
        """
        return run_alone(self.updating(fields, texts_of, loss, step=step))[0]

    def updating(
        self,
        fields: Fields,
        texts_of: TextsFunction,
        loss: OutputFunction,
        *,
        step: int,
        outputs: Sequence[Tensor] | None = None,
    ) -> Updates[tuple[float, Tensor | None]]:
        """Do as `update`, but yield the passes of the optimizer step, which may run with those of another model.

        outputs: list to which `loss` appends a tensor [b, t] without gradient for each micro-batch. Then these tensors
        are returned, too, as one float32 [B, T] for all rows.
        """
        assignment = self.assign_rows(fields, texts_of)
        computed = assignment.rows(fields)
        with self.offloader.in_use(moments=True):
            micros = self.split(computed, texts_of, phase="update")
            norm = yield from self._updating(micros, loss, step=step)
        if outputs is None:
            return norm, None
        return norm, self._back(_of_rows(computed, micros, outputs), assignment, fields)

    def _updating(self, micros: Sequence[MicroBatch], loss: OutputFunction, *, step: int) -> Updates[float]:
        ranks = self.mesh.layout.data * self.mesh.layout.context

        def times_ranks(output: Any, micro: Fields) -> Tensor:
            return loss(output, micro) * ranks  # FSDP2 averages gradients over the data- and context-parallel ranks

        self._balance.begin([micro.given for micro in micros])
        with self._gradients.root_gathered():
            shares = yield UpdatePasses(self.model, micros, times_ranks, self._gradients.before_backward, self._run)
        self._balance.record()
        read = torch.stack(shares).tolist() if shares else []  # one read for all, as each read waits for the device
        total = self.mesh.from_last_stage(torch.tensor(sum(read) / ranks, dtype=torch.float64))
        is_end = self.mesh.is_first_stage != self.mesh.is_last_stage
        copied = trained_tie(self.model.module) if is_end else None
        sum_tied_gradients(copied, self.mesh)
        uncounted = None if self.mesh.is_first_stage else copied
        parameters, max_norm = self.model.module.parameters(), self._settings.max_grad_norm
        norm = clip_gradients(parameters, max_norm, self.mesh, uncounted=uncounted)
        measured = {"loss": self.mesh.sum([total])[0], "gradient norm": norm}
        recorder.add("skipped_updates", 0.0)
        broken = [f"the {name} is {value}" for name, value in measured.items() if not math.isfinite(value)]
        if broken:
            self._skip(broken[0], step=step)
        else:
            self._step(step)
        self._optimizer.zero_grad()
        return norm

    def _step(self, step: int) -> None:
        rate = learning_rate(self._settings, step, total_steps=self._total_steps, path=self._path)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * (self.rate_factor.value if self.rate_factor else 1.0)
        self._steps.take()
        self.skipped_in_a_row = 0

    def _skip(self, reason: str, *, step: int) -> None:
        self.skipped_in_a_row += 1
        recorder.add("skipped_updates", float(self.mesh.coordinate("data") == 0))  # the record sums over the data axis
        if self.skipped_in_a_row > self._max_skipped_updates:
            raise NumericsError(
                f"{self._path}: step {step}: {reason}, and {self.skipped_in_a_row} updates in a row failed, "
                f"more than the {self._max_skipped_updates} of spec.training.maxSkippedUpdates; "
                f"a lower optimizer.learningRate ({self._settings.learning_rate:g}) is the usual remedy"
            )
        recorder.warn(f"skipped_updates {self._path}", f"{self._path}: {reason}, so an update was skipped")
