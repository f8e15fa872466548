"""Runs the jobs of a manifest in dependency order, on one Ray, into one run folder."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from rlhf_api.exit_codes import ExitCode
from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_mapper.mapping import Inventory, Mapping
from rlhf_mapper.place import place
from rlhf_trainer.run.display import Display
from rlhf_trainer.run.folder import JOB, JobFolder, add_to_summary, model_folders, read_summary
from rlhf_trainer.run.publisher import Publisher
from rlhf_trainer.run.session import inventory, ray_session
from rlhf_trainer.run.stage import run_stage
from rlhf_trainer.run.wiring import RayRuntime


class Stopped(Exception):  # noqa: N818 it is no error
    """A signal asked the run to stop; `exit_code` says which."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_code = 128 + signal_number


def run_file(manifest: Path, *, output: Path, overrides: Sequence[str], restart: bool, address: str | None) -> None:
    """Run every job of the manifest; a job that has succeeded in this folder before is not run again.

    Raises SpecError, TrainerError or Stopped; the folder of the job that failed says why.
    """
    jobs = load(manifest, overrides)
    folders = {job.name: model_folders(job, output) for job in jobs}
    here = Inventory(gpus_per_machine=(torch.cuda.device_count(),))
    address = address or os.environ.get("RAY_ADDRESS")
    own = {job.name: place(job, here) for job in jobs} if not address else {}
    slots = max((sum(pool.size for pool in mapping.pools) for mapping in own.values()), default=0)
    if restart:
        shutil.rmtree(output, ignore_errors=True)
    display = Display()
    pending = unfinished(jobs, output)
    for job in jobs:
        if job not in pending:
            display.say(f"{job.name}: already finished in {output / job.name}; --restart runs it again")
    if pending:
        with stop_on_signals(), ray_session(address, cpu_slots=slots):
            placed = own or {job.name: place(job, inventory()) for job in jobs}
            for job in pending:
                run_job(job, placed[job.name], folders[job.name], output=output, display=display)
    display.table(read_summary(output))
    display.say(f"run folder: {output}")


def unfinished(jobs: Sequence[Job], output: Path) -> list[Job]:
    """The jobs that have not succeeded in this folder, and those that read the output of one that has not."""
    pending: list[Job] = []
    for job in jobs:
        stale = {f"{JOB}{other.name}" for other in pending} & {model.uri for model in job.models().values()}
        if stale or not JobFolder(output, job).finished():
            pending.append(job)
    return pending


def run_job(job: Job, placed: Mapping, folders: dict[Role, str], *, output: Path, display: Display) -> None:
    """Run one job into its folder and add what it measured to summary.json."""
    folder = JobFolder(output, job)
    folder.begin()
    publisher = Publisher(job, folder, display)
    publisher.say(f"{job.spec.algorithm.name} on {placed_text(placed)}")
    try:
        summary = on_ray(job, placed, folders, folder, publisher)
    except BaseException as error:
        code = getattr(error, "exit_code", ExitCode.SIGINT if isinstance(error, KeyboardInterrupt) else 1)
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        reason = "Stopped" if stopped else ExitCode(code).name.title().replace("_", "")
        folder.fail(reason=reason, exit_code=ExitCode(code), message=str(error) or type(error).__name__)
        raise
    folder.succeed()
    add_to_summary(output, job.name, summary)


def on_ray(
    job: Job, placed: Mapping, folders: dict[Role, str], folder: JobFolder, publisher: Publisher
) -> dict[str, Any]:
    """Run one job's stage on pools of its own."""
    runtime = RayRuntime(job, placed, folders)
    with runtime.running() as shape:
        for fact in shape.facts:
            publisher.say(fact)
        return run_stage(
            job,
            runtime,
            total_steps=job.total_steps_for(shape.rows),
            evaluation_rows=shape.evaluation_rows,
            model_folder=folder.model.resolve(),
            publisher=publisher,
        )


def placed_text(placed: Mapping) -> str:
    """The pools in a few words: `2 CPU slots (actor, critic)`."""
    return " | ".join(f"{pool.size} {placed.device} slots ({', '.join(pool.models)})" for pool in placed.pools)


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise Stopped in the main thread while the block runs."""

    def stop(signal_number: int, _: FrameType | None) -> None:
        raise Stopped(signal_number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
