"""Updates of two models that run together: the passes of both over micro-batches are one schedule of a pipeline."""

from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from rlhf_mapper.architecture import architecture_of
from rlhf_mapper.fused_schedule import PipelineUpdate, fused_schedule
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import ModelMesh
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.passes import BeforeBackward, MicroBatch, OutputFunction, Passes, StageRun, run_passes
from rlhf_trainer.training.sharding import ShardedModel
from rlhf_trainer.types import Fields

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

    def counted(self, output: Any, fields: Fields) -> Tensor:
        """Call `compute`; its measurements are recorded where they count."""
        with recorder.counting(self.model.mesh.is_counted):
            return self.compute(output, fields)

    def as_simulated(self) -> PipelineUpdate:
        """Return the update for `fused_schedule`, the same on every rank: its seconds are parameters of the model."""
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
    stages, rank = mesh.layout.pipeline, mesh.coordinate("pipeline")
    passes = fused_schedule(stages, simulated).ranks[simulated[0].stage(rank, stages)]
    runs = [StageRun(each.model, each.micros, each.counted, each.before_backward) for each in updates]
    run_passes([(runs[each.model], each.is_backward, each.micro_batch) for each in passes])
    return [run.results for run in runs]
