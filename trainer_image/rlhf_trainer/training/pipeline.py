"""Pipeline parallelism by torch.distributed.pipelining: a stage of a transformers model, and its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from rlhf_trainer.protocols import blocks
from rlhf_trainer.training.distributed import device_here
from rlhf_trainer.training.mesh import ModelMesh
from rlhf_trainer.training.models import LeftOut, inner
from rlhf_trainer.training.passes import Compute, MicroBatch, Reads


def cut_stage(model: nn.Module, mesh: ModelMesh) -> None:
    """Leave this rank's stage of a LanguageModel or Scorer: the layers of a block, first the embedding, last the head.

    A head that is tied to the embedding stays with the last stage, whose copy goes by its own name.
    """
    pretrained = inner(model)
    base: Any = pretrained.base_model
    mine = blocks(len(base.layers), mesh.layout.pipeline)[mesh.place("pipeline")]
    for number in range(len(base.layers)):
        if number not in mine:
            base.layers[number] = LeftOut()
    if not mesh.is_first_stage:
        base.embed_tokens = None
    if not mesh.is_last_stage:
        base.norm = LeftOut()
        setattr(pretrained, "lm_head" if hasattr(pretrained, "lm_head") else "score", LeftOut())


class Pipeline:
    """Runs the micro-batches of one stage in step with the other stages, one forward and one backward in turn."""

    def __init__(self, model: nn.Module, mesh: ModelMesh, *, dtype: torch.dtype) -> None:
        """dtype: of the hidden states between stages."""
        self._model, self._mesh, self._dtype = model, mesh, dtype

    def infer(self, micros: Sequence[MicroBatch], reads: Reads, compute: Compute) -> list[Tensor]:
        """`compute` of each micro-batch; only the last stage has them, the others get none."""
        return self._run(micros, reads, compute, learns=False)

    def learn(self, micros: Sequence[MicroBatch], reads: Reads, loss: Compute) -> list[Tensor]:
        """The losses of the micro-batches, after the backward pass of each; only on the last stage."""
        return self._run(micros, reads, loss, learns=True)

    def _run(self, micros: Sequence[MicroBatch], reads: Reads, compute: Compute, *, learns: bool) -> list[Tensor]:
        mesh, count = self._mesh, self._mesh.layout.pipeline
        even = evened(micros, at_least=count)
        tokens = [reads(micro.fields) for micro in even]
        hidden = torch.empty(
            (*tokens[0].shape, inner(self._model).config.hidden_size), dtype=self._dtype, requires_grad=learns
        )
        stage = PipelineStage(
            StageOutput(self._model, even, compute) if mesh.is_last_stage else StagePart(self._model),
            mesh.place("pipeline"),
            count,
            device_here(),
            input_args=(tokens[0] if mesh.is_first_stage else hidden,),
            output_args=(hidden.new_empty(()) if mesh.is_last_stage else hidden,),
            group=mesh.pipeline_group,
        )
        schedule = (Schedule1F1B if learns else ScheduleGPipe)(stage, len(even), loss_fn=_itself, scale_grads=False)
        results: list[Tensor] = []
        run = schedule.step if learns else schedule.eval
        run(
            *([torch.cat(tokens)] if mesh.is_first_stage else []),
            target=torch.zeros(len(even)) if mesh.is_last_stage else None,
            losses=results,
            return_outputs=False,
        )
        return results[: len(micros)]


class StagePart(nn.Module):
    """A stage that hands its hidden states on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: Tensor) -> Tensor:
        """Tokens [b, T] for the first stage, hidden states [b, T, H] for others, to hidden states."""
        states: Tensor = self.model(given)
        return states


class StageOutput(StagePart):
    """The last stage: what is computed from the model's output, micro-batch by micro-batch in their order."""

    def __init__(self, model: nn.Module, micros: Sequence[MicroBatch], compute: Compute) -> None:
        super().__init__(model)
        self._micros, self._compute = iter(micros), compute

    def forward(self, given: Tensor) -> Tensor:
        return self._compute(self.model(given), next(self._micros).fields)


def evened(micros: Sequence[MicroBatch], *, at_least: int) -> list[MicroBatch]:
    """Micro-batches of one shape: fields are padded with 0 to the most rows and the widest; `at_least` so many."""
    rows = max(next(iter(micro.fields.values())).shape[0] for micro in micros)
    width = max(field.shape[1] for micro in micros for field in micro.fields.values() if field.dim() > 1)
    even = []
    for micro in micros:
        fields = {}
        for name, field in micro.fields.items():
            fields[name] = field.new_zeros((rows, width)[: field.dim()])
            fields[name][tuple(slice(size) for size in field.shape)] = field
        even.append(MicroBatch(fields=fields, rows=micro.rows))
    nothing = MicroBatch(
        fields={name: torch.zeros_like(field) for name, field in even[0].fields.items()}, rows=micros[0].rows[:0]
    )
    return even + [nothing] * (at_least - len(even))


def add_gradients_of_copies(parameter: nn.Parameter | None, mesh: ModelMesh) -> None:
    """First and last stage each hold a copy of a tied embedding (`parameter`): both get the sum of its gradients."""
    if parameter is None:
        return
    gradient = parameter.grad
    assert gradient is not None, "both uses of the embedding have a gradient"
    mine = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    other = torch.empty_like(mine)
    group = mesh.pipeline_group
    peer = dist.get_global_rank(group, mesh.layout.pipeline - 1 if mesh.is_first_stage else 0)
    exchange = [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    mine += other


def _itself(output: Tensor, _: Tensor) -> Tensor:
    """The loss of a micro-batch, which the last stage has computed already."""
    return output
