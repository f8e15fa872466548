"""Forward and backward passes over micro-batches: on the whole model, or on one stage of a pipeline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from rlhf_trainer.protocols import blocks
from rlhf_trainer.training.distributed import ModelMesh, device_here, local_shard
from rlhf_trainer.training.model_input import ModelInput, TokenBatch
from rlhf_trainer.training.models import MissingLayer, inner
from rlhf_trainer.types import Fields

TextsFunction = Callable[[Fields], Sequence[TokenBatch]]
"""Function from a micro-batch's fields to the model's input: one `TokenBatch` of b rows, or two for pairs."""
OutputFunction = Callable[[Any, Fields], Tensor]
"""Function (model output [rows, T], `Likelihood` or scores, all texts stacked; fields) -> loss, or tensor [b, t]."""
BeforeBackward = Callable[[bool], None]
"""Callback before each backward pass of an update; its argument is true before the last backward pass."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows of a batch that one forward pass computes, on the device, cut to the longest row."""

    fields: Fields
    """Fields of the micro-batch's rows, each [b, t] or [b]."""
    given: ModelInput
    rows: Tensor
    """Indices of the rows in the rank's batch: int64 [b]; empty for a padding micro-batch, which joins collectives."""


Passes = Callable[[Sequence[MicroBatch], OutputFunction, BeforeBackward | None], list[Tensor]]
"""Function that runs micro-batches and returns the results of `compute`; with a callback also runs backward passes."""


def run_whole(
    model: nn.Module, micros: Sequence[MicroBatch], compute: OutputFunction, before_backward: BeforeBackward | None
) -> list[Tensor]:
    """Run micro-batches (`Passes`) one after the other, on a rank that holds all pipeline stages of the model."""
    results = []
    for number, micro in enumerate(micros, start=1):
        result = compute(model(micro.given.tokens, micro.given), micro.fields)
        if before_backward:
            before_backward(number == len(micros))
            torch.autograd.backward(result)
        results.append(result.detach())
    return results


def keep_stage(model: nn.Module, mesh: ModelMesh) -> None:
    """Remove all but this rank's pipeline stage from a LanguageModel or Scorer, in place.

    A stage is a block of layers; the first also holds the embedding, the last the final norm and the head. A tied head
    stays on the last stage, as a copy of the embedding.
    """
    pretrained = inner(model)
    base: Any = pretrained.base_model
    mine = blocks(len(base.layers), mesh.layout.pipeline)[mesh.coordinate("pipeline")]
    for number in range(len(base.layers)):
        if number not in mine:
            base.layers[number] = MissingLayer()
    if not mesh.is_first_stage:
        base.embed_tokens = None
    if not mesh.is_last_stage:
        base.norm = MissingLayer()
        setattr(pretrained, "lm_head" if hasattr(pretrained, "lm_head") else "score", MissingLayer())


def run_stage(
    model: nn.Module,
    mesh: ModelMesh,
    dtype: torch.dtype,
    micros: Sequence[MicroBatch],
    compute: OutputFunction,
    before_backward: BeforeBackward | None,
) -> list[Tensor]:
    """Run micro-batches (`Passes`) on a rank that holds one of several stages: scoring by GPipe, training by 1F1B.

    dtype: type of the hidden states that a stage sends to the next. Only the last stage returns tensors.
    """
    backward = before_backward is not None
    tokens = [micro.given.tokens for micro in micros]
    hidden = torch.empty(hidden_shape(model, mesh, micros), dtype=dtype, requires_grad=backward)
    part = StageModule(model, micros, compute if mesh.is_last_stage else None, before_backward)
    if before_backward:
        before_backward(len(micros) == 1)
    stage = PipelineStage(
        part,
        mesh.coordinate("pipeline"),
        mesh.layout.pipeline,
        device_here(),
        input_args=(tokens[0] if mesh.is_first_stage else hidden,),
        output_args=(hidden.new_empty(()) if mesh.is_last_stage else hidden,),
        group=mesh.pipeline_group,
    )
    ranks = map(mesh.rank_of_stage, range(mesh.layout.pipeline))  # torch assumes that rank s holds stage s
    stage.stage_index_to_group_rank = {
        s: dist.get_group_rank(mesh.pipeline_group, rank) for s, rank in enumerate(ranks)
    }
    kind = Schedule1F1B if backward else ScheduleGPipe
    schedule = kind(stage, len(micros), loss_fn=lambda loss, _: loss, scale_grads=False)
    results: list[Tensor] = []
    run = schedule.step if backward else schedule.eval
    run(
        *([torch.cat(tokens)] if mesh.is_first_stage else []),
        target=torch.zeros(len(micros)) if mesh.is_last_stage else None,
        losses=results,
        return_outputs=False,
    )
    return results


def hidden_shape(model: nn.Module, mesh: ModelMesh, micros: Sequence[MicroBatch]) -> tuple[int, int, int]:
    """Return the shape [1, N / t, H] of the hidden states that a stage sends to the next one for each micro-batch."""
    return 1, micros[0].given.tokens.shape[1] // mesh.layout.tensor, inner(model).config.hidden_size


class StageModule(nn.Module):
    """A pipeline stage: its output is hidden states, or on the last stage the result of `compute`."""

    def __init__(
        self,
        model: nn.Module,
        micros: Sequence[MicroBatch],
        compute: OutputFunction | None,
        before_backward: BeforeBackward | None,
    ) -> None:
        """micros: micro-batches in the schedule's order; before_backward: called before the last backward pass."""
        super().__init__()
        self.model, self._micros, self._done = model, micros, 0
        self._compute, self._before_backward = compute, before_backward

    def forward(self, given: Tensor) -> Tensor:
        """Run one micro-batch; given: tokens [1, N] on the first stage, hidden states [1, N / t, H] on the others."""
        micro = self._micros[self._done]
        self._done += 1
        output: Tensor = self.model(given, micro.given)
        if self._compute is not None:
            output = self._compute(output, micro.fields)
        if (before := self._before_backward) and self._done == len(self._micros):  # torch announces no backward pass
            output.register_hook(lambda _: before(True))  # type: ignore[no-untyped-call]
        return output


def sum_tied_gradients(parameter: nn.Parameter | None, mesh: ModelMesh) -> None:
    """Give both copies of a tied embedding, on the first and the last stage, the sum of their gradients."""
    if parameter is None:
        return
    gradient = parameter.grad
    assert gradient is not None, "both uses of the embedding have a gradient"
    mine = local_shard(gradient)
    sent = mine.to(device_here())
    other = torch.empty_like(sent)
    group = mesh.pipeline_group
    peer = mesh.rank_of_stage(mesh.layout.pipeline - 1 if mesh.is_first_stage else 0)
    exchange = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    mine += other.to(mine.device)
