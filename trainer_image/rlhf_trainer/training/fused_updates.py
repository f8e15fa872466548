"""Updates of two models that run together: the passes of both over micro-batches are one schedule of a pipeline."""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mapper.architecture import architecture_of
from rlhf_mapper.fused_schedule import Pass, PipelineUpdate, fused_schedule
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import ModelMesh, device_here
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.passes import BeforeBackward, MicroBatch, OutputFunction, Passes, hidden_shape
from rlhf_trainer.training.sharding import ShardedModel

RECEIVES_AHEAD = 3
"""Number of passes whose inputs a rank receives at a time: of the pass that it computes and of the next ones."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class UpdatePasses:
    """Forward and backward passes of one optimizer step of a model."""

    model: ShardedModel
    micros: Sequence[MicroBatch]
    compute: OutputFunction
    before_backward: BeforeBackward
    run: Passes
    """Function that runs the passes of this model alone."""

    def alone(self) -> list[Tensor]:
        """Run the passes; return the results of `compute`."""
        return self.run(self.micros, self.compute, self.before_backward)

    def as_simulated(self) -> PipelineUpdate:
        """Return the update for `fused_schedule`, equal on all ranks: numbers of parameters stand for seconds."""
        model = architecture_of(inner(self.model.module).config.to_dict())
        count, reverses = len(self.micros), self.model.mesh.layout.reverses_stages
        forward = model.layers * model.active_layer_parameters / count
        return PipelineUpdate(micro_batches=count, forward=forward, backward=2 * forward, reverses=reverses)


Updates: TypeAlias = Generator[UpdatePasses, list[Tensor] | None, Result]
"""Optimizer steps of a model: yields the passes of each step, is sent the results of `compute`, returns a result."""


def run_alone(updates: Updates[Result]) -> Result:
    """Run a model's optimizer steps; return their result."""
    results: list[Tensor] | None = None
    while True:
        try:
            passes = updates.send(results)
        except StopIteration as end:
            found: Result = end.value
            return found
        results = passes.alone()


def run_together(models: Sequence[tuple[ModelMesh, Updates[object]]]) -> None:
    """Run the optimizer steps of models that share their ranks: the first steps of all as one schedule, and so on."""
    results: dict[int, list[Tensor] | None] = dict.fromkeys(range(len(models)))
    while results:
        asked = {number: _next_passes(*models[number], result) for number, result in results.items()}
        passes = {number: each for number, each in asked.items() if each}
        results = dict(zip(passes, run_fused(list(passes.values())), strict=True)) if passes else {}


def _next_passes(mesh: ModelMesh, updates: Updates[object], results: list[Tensor] | None) -> UpdatePasses | None:
    """Give a model's updates the results of their last passes; return their next passes, None if they have ended."""
    with recorder.counting(mesh.is_counted), suppress(StopIteration):
        return updates.send(results)
    return None


def run_fused(updates: Sequence[UpdatePasses]) -> list[list[Tensor]]:
    """Run the passes of several models by `fused_schedule`; return the results of each model's `compute`."""
    simulated, mesh = tuple(each.as_simulated() for each in updates), updates[0].model.mesh
    if len(updates) == 1:
        with recorder.counting(mesh.is_counted):
            return [updates[0].alone()]
    stages = mesh.layout.pipeline
    passes = fused_schedule(stages, simulated).ranks[simulated[0].stage(mesh.coordinate("pipeline"), stages)]
    runs = [_StageRun(each) for each in updates]
    inputs: deque[_Received] = deque()
    for number, each in enumerate(passes):
        for later in passes[number + len(inputs) : number + RECEIVES_AHEAD]:
            inputs.append(runs[later.model].receive(later))
        runs[each.model].run(each, inputs.popleft())
    for run in runs:
        run.end()
    return [run.results for run in runs]


_Received: TypeAlias = tuple[Tensor, dist.Work] | None
"""Buffer of a pass's input and the transfer that fills it; None if no other rank sends the input."""


class _StageRun:
    """Passes of one model through the stage that this rank holds."""

    def __init__(self, update: UpdatePasses) -> None:
        self._update, self._mesh = update, update.model.mesh
        self._ways = self._mesh.pipeline_ways
        self._shape = hidden_shape(update.model.module, self._mesh, update.micros)
        self._held: deque[tuple[Tensor, Tensor]] = deque()
        """Input and output of each micro-batch between its forward and its backward pass."""
        self._sent: dict[bool, deque[tuple[Tensor, dist.Work]]] = {False: deque(), True: deque()}
        """Tensors of the last forward and backward passes, until the next rank has them."""
        self.results: list[Tensor] = []

    def receive(self, each: Pass) -> _Received:
        """Begin to receive the input of a pass: hidden states, or their gradient."""
        if self._mesh.is_last_stage if each.is_backward else self._mesh.is_first_stage:
            return None
        buffer = torch.empty(self._shape, dtype=self._update.model.compute_dtype, device=device_here())
        work = dist.irecv(buffer, self._neighbour(from_next=each.is_backward), self._ways[each.is_backward])
        assert work is not None, "this rank is in the group"
        return buffer, work

    def run(self, each: Pass, received: _Received) -> None:
        """Compute a pass once its input has arrived, and begin to send its output."""
        if received:
            received[1].wait()
        output = self._backward(each, received) if each.is_backward else self._forward(each, received)
        if self._mesh.is_first_stage if each.is_backward else self._mesh.is_last_stage:
            return
        work = dist.isend(output, self._neighbour(from_next=not each.is_backward), self._ways[each.is_backward])
        assert work is not None, "this rank is in the group"
        sent = self._sent[each.is_backward]
        sent.append((output, work))
        if len(sent) > self._mesh.layout.pipeline:  # the oldest has arrived: no rank is so many ahead
            sent.popleft()[1].wait()

    def end(self) -> None:
        """Wait until the neighbours have received all sent tensors."""
        for sent in self._sent.values():
            for _, work in sent:
                work.wait()

    def _forward(self, each: Pass, received: _Received) -> Tensor:
        micro = self._update.micros[each.micro_batch]
        given = received[0].requires_grad_() if received else micro.given.tokens
        output: Tensor = self._update.model.module(given, micro.given)
        if self._mesh.is_last_stage:
            with recorder.counting(self._mesh.is_counted):
                output = self._update.compute(output, micro.fields)
            self.results.append(output.detach())
        self._held.append((given, output))
        return output.detach()

    def _backward(self, each: Pass, received: _Received) -> Tensor:
        given, output = self._held.popleft()
        self._update.before_backward(each.micro_batch + 1 == len(self._update.micros))
        torch.autograd.backward(output, received[0] if received else None)
        return given if given.grad is None else given.grad

    def _neighbour(self, *, from_next: bool) -> int:
        return self._mesh.rank_of_stage(self._mesh.coordinate("pipeline") + (1 if from_next else -1))
