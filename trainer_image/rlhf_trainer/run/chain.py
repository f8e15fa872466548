"""Runs the jobs of a manifest in dependency order, on one Ray, into one run folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_mapper.mapping import DeviceMapping
from rlhf_planning.numbers import duration
from rlhf_trainer.outputs.display import Display
from rlhf_trainer.outputs.listeners import Listener, OutputOptions, opened
from rlhf_trainer.outputs.live import display_for
from rlhf_trainer.report.page import write_report
from rlhf_trainer.run.checkpoints import KeptCheckpoints
from rlhf_trainer.run.job_run import run_job
from rlhf_trainer.run.machine import write_environment
from rlhf_trainer.run.placement import Placed, place_job
from rlhf_trainer.run.preconditions import require_no_cluster, require_one_vocabulary
from rlhf_trainer.run.publisher import Publisher
from rlhf_trainer.run.resume import Start, from_the_start, unfinished
from rlhf_trainer.run.session import gpus_per_machine, ray_session
from rlhf_trainer.run.stopping import StopSignals
from rlhf_trainer.run.wiring import RayRuntime
from rlhf_trainer.run_folder.attempt import own_attempt
from rlhf_trainer.run_folder.folder import (
    SAVE_REQUEST,
    SUMMARY,
    JobFolder,
    add_to_summary,
    load_with_finished,
    model_folders,
    read_summary,
    written,
)
from rlhf_trainer.run_folder.lock import only_run_in


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What the jobs of a run have in common."""

    output: Path
    display: Display
    listeners: Sequence[Listener]
    stop: StopSignals


def run_file(
    manifest: Path,
    *,
    output: Path,
    overrides: Sequence[str],
    restart: bool,
    address: str | None,
    options: OutputOptions,
) -> None:
    """Run every job of the manifest: from its newest checkpoint on, and not again if it has succeeded in this folder.

    Raises SpecError, TrainerError or Stopped; the folder of the job that failed says why.
    """
    jobs = load_with_finished(output, manifest, overrides)
    require_no_cluster(jobs)
    folders = {job.name: model_folders(job, output) for job in jobs}
    here = (torch.cuda.device_count(),)
    address = address or os.environ.get("RAY_ADDRESS")
    own = {job.name: place_job(job, here, jobs, output) for job in jobs} if not address else {}
    slots = max((sum(pool.size for pool in placed.mapping.pools) for placed in own.values()), default=0)
    display = display_for(jobs)
    stop = StopSignals(display.say)
    with only_run_in(output), opened(options, output) as listeners:
        if restart:
            clear(output, jobs)
        starts = from_the_start(jobs, output) if restart else unfinished(jobs, output)
        for job in jobs:
            if job.name not in starts:
                skip_finished(job, output, display)
        pending = [job for job in jobs if job.name in starts]
        if pending:
            make_ready(output, pending)
        context = RunContext(output=output, display=display, listeners=listeners, stop=stop)
        with (
            stop.handled(),
            ray_session(address, cpu_slots=slots) if pending else nullcontext(),
            display.showing(pending),
        ):
            stop.install()  # once more, for Ray installs signal handlers of its own when it starts
            placed = own or {job.name: place_job(job, gpus_per_machine(), jobs, output) for job in pending}
            for job in pending:
                run_on_ray(job, placed[job.name], folders[job.name], start=starts[job.name], context=context)
        display.table(read_summary(output))
        write_report_or_warn(output, display)
    display.say(f"run folder: {output}")


def skip_finished(job: Job, output: Path, display: Display) -> None:
    """A job that has succeeded here before is not run again; its status becomes that of this attempt."""
    display.say(f"{job.name}: already finished in {output / job.name}; --restart runs it again")
    if own_attempt():
        JobFolder(output, job).adopt()


def clear(output: Path, jobs: Sequence[Job]) -> None:
    """Forget what earlier runs of the jobs left in the run folder."""
    with written(output):
        (output / SUMMARY).unlink(missing_ok=True)
    for job in jobs:
        JobFolder(output, job).clear()


def make_ready(output: Path, pending: Sequence[Job]) -> None:
    """What can be known to fail before anybody has trained for hours does so here: disks and object stores."""
    with written(output):
        (output / SAVE_REQUEST).unlink(missing_ok=True)
        write_environment(output)
    for job in pending:
        JobFolder(output, job).checkpoints.try_writing()


def write_report_or_warn(output: Path, display: Display) -> None:
    """Write the report; a report that fails does not undo a run that has finished."""
    try:
        write_report(output)
    except Exception as error:  # noqa: BLE001 whatever it is, the run has finished
        display.warn(f"no report: {type(error).__name__}: {error}")


def report_mapping(placed: DeviceMapping, publisher: Publisher) -> None:
    """Leave the mapping in the job's folder, and say what a step is predicted to take."""
    publisher.folder.write_mapping(placed)
    if prediction := placed.prediction:
        pools = "1 pool" if len(placed.pools) == 1 else f"{len(placed.pools)} pools"
        publisher.say(f"mapped: {pools}, predicted {duration(prediction.step_seconds)} a step")


def run_on_ray(job: Job, placed: Placed, folders: dict[Role, str], *, start: Start, context: RunContext) -> None:
    """Run one job into its folder and add what it measured to summary.json."""
    folder = JobFolder(context.output, job)
    folder.begin(start.checkpoint, inputs=start.inputs)
    publisher = Publisher(job, folder, context.display, context.listeners)
    mapping = placed.mapping
    publisher.say(f"{job.spec.algorithm.name} on {' | '.join(map(mapping.described, mapping.pools))}")
    report_mapping(mapping, publisher)
    if placed.unmapped:
        publisher.say(f"not mapped: {placed.unmapped}")
    if start.checkpoint:
        publisher.say(f"goes on after step {start.checkpoint.step}, from {start.checkpoint.uri}")
    with publisher.recording_the_end():
        require_one_vocabulary(job, folders)
        runtime = RayRuntime(job, mapping, folders, stacks=folder.path / "stacks.txt")
        with runtime.running() as shape:
            for fact in shape.facts:
                publisher.say(fact)
            summary = run_job(
                job,
                runtime,
                shape,
                model_folder=folder.model.resolve(),
                publisher=publisher,
                checkpoints=KeptCheckpoints(
                    job, folder, runtime.models, rows=shape.rows, stop=context.stop, resumed=start.checkpoint
                ),
            )
        add_to_summary(context.output, job.name, summary)
