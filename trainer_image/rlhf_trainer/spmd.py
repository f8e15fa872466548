"""Offline jobs as plain SPMD programs: `torchrun --nproc-per-node N -m rlhf_trainer.spmd PROGRAM FILE`.

Every rank runs the algorithm on its own rows, without Ray and without a controller. There are no checkpoints: a run
that was stopped starts from the beginning (`rlhf run` resumes).
"""

import faulthandler
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import Problem, SpecError
from rlhf_api.spec.parallel_sizes import Parallelism, ParallelSizes
from rlhf_mapper.mapping import Device, DeviceMapping, MappedPool
from rlhf_mapper.place import device_of
from rlhf_trainer.commands.ending import ending
from rlhf_trainer.errors import TrainerError, together
from rlhf_trainer.fields import require_declared
from rlhf_trainer.outputs.display import Display, LastingConsole
from rlhf_trainer.outputs.opening import OutputOptions, open_listeners
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.run.deep_check import problems
from rlhf_trainer.run.evaluation import evaluation_of
from rlhf_trainer.run.job_run import Checkpoints, Reporter, run_job
from rlhf_trainer.run.preconditions import require_no_cluster, require_possible
from rlhf_trainer.run.publisher import Publisher
from rlhf_trainer.run.resume import from_the_start
from rlhf_trainer.run.step_models import connected, step_models_of
from rlhf_trainer.run.worker_specs import data_spec, worker_specs
from rlhf_trainer.run_folder.folder import (
    JobFolder,
    add_to_summary,
    load_with_finished,
    model_folders,
    with_written_data,
)
from rlhf_trainer.run_folder.lock import only_run_in
from rlhf_trainer.telemetry import Report, recorder
from rlhf_trainer.training import compression, distributed
from rlhf_trainer.training.distributed import device_here
from rlhf_trainer.types import Batch, Transfer

PROGRAMS = {"sft": "SFT", "reward_model": "RewardModel", "cost_model": "CostModel", "dpo": "DPO", "kto": "KTO"}


class RankValues:
    """Return values of a method on all ranks, which `result`, a collective, gathers."""

    def __init__(self, value: Any, counted: Sequence[int]) -> None:
        """Keep this rank's value; counted: the ranks whose values make up the result."""
        self._value, self._counted = value, counted

    def result(self) -> list[Any]:
        """Gather the method's return value from all ranks; return those of the ranks in `counted`. A collective."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self._value)
        return [gathered[rank] for rank in self._counted]


class LocalModel:
    """A worker with the interface of a `ModelHandle`, whose calls run at once, in this process, on this rank's rows."""

    def __init__(self, worker: Any, layout: ParallelSizes, transfers: Mapping[str, Transfer]) -> None:
        """Offer the worker's methods; transfers: their transfer declarations."""
        for name, transfer in transfers.items():
            setattr(self, name, partial(self._call, getattr(worker, name), transfer, layout))

    @staticmethod
    def _call(
        method: Any, transfer: Transfer, layout: ParallelSizes, batch: Batch | None = None, **arguments: Any
    ) -> Any:
        counted = [rank for ranks in transfer.protocol.collect(layout) for rank in ranks]
        timed = recorder.span(transfer.phase) if transfer.phase else nullcontext()
        with timed, recorder.counting(dist.get_rank() in counted):
            result = method(*([] if batch is None else [batch]), **arguments)
        if batch is None or transfer.adds is None:
            return RankValues(result, counted)
        require_declared(result, transfer.adds, rows=batch.size)
        return batch.with_fields(result)


class SpmdRuntime:
    """Runtime of one rank under torchrun: its models, whose calls run at once."""

    def __init__(self, models: Mapping[str, Any], step_models: Mapping[str, Any], layout: ParallelSizes) -> None:
        self.models, self.step_models, self._layout = models, step_models, layout

    def blank(self, step: int, size: int) -> Batch:
        """Return this rank's rows of a batch of `size` rows, without fields."""
        rows = THREE_D_PROTO.distribute(self._layout, size)[dist.get_rank()]
        return Batch(step=step, start=rows.start, size=len(rows))

    def send(self) -> None:
        """Do nothing, where a controller sends its pending calls: under torchrun a call runs at once."""

    def drain(self, step: int = 0) -> Sequence[Report]:  # noqa: ARG002 no call is of a later step
        """Return the measurements of every rank since the last call; a collective."""
        return RankValues(recorder.drain(), range(dist.get_world_size())).result()


def main(
    program: Annotated[str, typer.Argument(help=f"One of {', '.join(PROGRAMS)}.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Manifest; its first job of that kind is run.")],
    output: Annotated[Path | None, typer.Option(help="Run folder; default runs/<file name>.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="[NAME:]PATH=VALUE")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run one offline job on the ranks that torchrun started."""
    faulthandler.enable()  # NCCL's watchdog ends a rank that waits too long, and prints no Python stack
    folder = output or Path("runs") / file.stem
    code, _ = ending(lambda: run_program(program, file, folder, sets or []), debug=debug)
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit without finalising the interpreter: threads of Arrow or gloo that use it then abort the process.
    os._exit(code)


def run_program(program: str, file: Path, output: Path, overrides: Sequence[str]) -> None:
    """Run the program of one rank, from the manifest to the summary; rank 0 writes the run folder."""
    jobs = load_with_finished(output, file, overrides)
    job = job_of(program, jobs, file)
    require_no_cluster([job])
    running = with_written_data(job, output)
    if JobFolder(output, job).newest_checkpoint():
        problem = "has checkpoints of `rlhf run`, which go on from there; use another --output"
        raise SpecError([Problem(str(output / job.name), problem)])
    folders = model_folders(job, output)
    device = device_of(job, (torch.cuda.device_count(),))
    layout = layout_here(job, int(os.environ["WORLD_SIZE"]))
    models = {role: (model, folders[role]) for role, model in job.models().items()}
    require_possible(job, dict.fromkeys(models, layout), models)
    recorder.rank = distributed.start(device, job.spec.training.call_deadline)
    folder = JobFolder(output, job)
    try:
        if recorder.rank > 0:
            require_ready(job, jobs, output)
            run_rank(running, folders, Reporter(), layout=layout, made=folder.made.resolve())
            return
        display = Display(LastingConsole(highlight=False))
        with only_run_in(output), open_listeners(OutputOptions(), output, display.warn) as listeners_of:
            start = from_the_start(jobs, output)[job.name]
            folder.begin(None, inputs=start.inputs, evidence=start.evidence)
            publisher = Publisher(job, folder, display, listeners_of)
            with publisher.recording_the_end():
                require_ready(job, jobs, output)
                publisher.say(*compression.in_words(job, dict.fromkeys(models, layout)))
                summary = run_rank(running, folders, publisher, layout=layout, made=folder.made.resolve())
                add_to_summary(output, job.name, summary)
    finally:
        dist.destroy_process_group()


def require_ready(job: Job, jobs: Sequence[Job], output: Path) -> None:
    """Check on rank 0 that the job's models, data and disk are usable; every rank raises the error. A collective."""
    found: list[TrainerError | None] = [None]
    if dist.get_rank() == 0:
        try:
            errors = [error for _, error in problems([job], jobs, output)]
            found = [together(errors)] if errors else found
        except TrainerError as error:
            found = [error]
    dist.broadcast_object_list(found)
    if found[0]:
        raise found[0]


def run_rank(
    job: Job, folders: Mapping[Role, str], reporter: Reporter, *, layout: ParallelSizes, made: Path
) -> dict[str, Any]:
    """Build this rank's workers and run the job's steps; returns the summary."""
    pool = MappedPool(name="ranks", models=tuple(job.models()), slots_per_machine=(dist.get_world_size(),))
    device: Device = "GPU" if device_here().type == "cuda" else "CPU"
    placed = DeviceMapping(device=device, pools=(pool,), sizes=dict.fromkeys(job.models(), layout))
    loading = data_spec(job, placed, folders)
    data = loading.build()
    shape = data.describe()
    specs = worker_specs(job, placed, folders, shape, path=made.parent)[pool.name]
    models = {"data": LocalModel(data, layout, loading.transfers)}
    models |= {role: LocalModel(specs[role].build(), layout, specs[role].transfers) for role in job.models()}
    models = connected(job, models)
    runtime = SpmdRuntime(models, step_models_of(job, models), layout)
    return run_job(
        job,
        runtime,
        shape,
        saves=(job.saved, made),
        evaluation=evaluation_of(job, runtime, shape),
        checkpoints=Checkpoints(),
        reporter=reporter,
    )


def layout_here(job: Job, world_size: int) -> ParallelSizes:
    """Return the layout of torchrun's ranks, one for all models of the job; SpecError if the manifest has others."""
    asked = {role: model.parallelism or Parallelism() for role, model in job.models().items()}
    first = next(iter(asked.values()))
    path = f"{job.name}: spec.models.{next(iter(asked))}.parallelism"
    if any(other != first for other in asked.values()):
        raise SpecError([Problem(path, "differs from that of another model; under torchrun all are cut alike")])
    layout = first.over(world_size)
    if layout.world_size != world_size or layout.data % layout.replicas:
        named = first.model_dump(exclude={name for name in ("context", "expert") if getattr(first, name) == 1})
        sizes = ", ".join(f"{name} {size or 'unset'}" for name, size in named.items())
        raise SpecError([Problem(path, f"is {sizes}, which do not fill {world_size} ranks")])
    if (ranks := layout.shards * layout.tensor) % layout.expert:
        raise SpecError([Problem(f"{path}.expert", f"is {layout.expert}, which does not divide {ranks} ranks")])
    return layout


def job_of(program: str, jobs: Sequence[Job], file: Path) -> Job:
    """Return the first job of the program's algorithm; `file`: the jobs' manifest, for error messages."""
    if program not in PROGRAMS:
        raise SpecError([Problem("program", f"is {program}; there are {', '.join(PROGRAMS)}")])
    for job in jobs:
        if job.spec.algorithm.name == PROGRAMS[program]:
            return job
    raise SpecError([Problem(str(file), f"has no {PROGRAMS[program]} job")])


if __name__ == "__main__":
    typer.run(main)
