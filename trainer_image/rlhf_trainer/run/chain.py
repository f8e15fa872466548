"""Runs the jobs of a manifest in dependency order, on one Ray, into one run folder."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import Problem, SpecError
from rlhf_mapper.mapping import Inventory, Mapping
from rlhf_mapper.place import place
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.report.page import write_report
from rlhf_trainer.run.display import Display
from rlhf_trainer.run.environment import write_environment
from rlhf_trainer.run.folder import JOB, SUMMARY, JobFolder, add_to_summary, model_folders, read_summary
from rlhf_trainer.run.publisher import Publisher, Stopped
from rlhf_trainer.run.session import inventory, ray_session
from rlhf_trainer.run.stage import run_stage
from rlhf_trainer.run.vocabulary import require_one_vocabulary
from rlhf_trainer.run.wiring import RayRuntime


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
    display = Display()
    with only_run_in(output):
        if restart:
            (output / SUMMARY).unlink(missing_ok=True)
        pending = jobs if restart else unfinished(jobs, output)
        if pending:
            write_environment(output)
        for job in jobs:
            if job not in pending:
                display.say(f"{job.name}: already finished in {output / job.name}; --restart runs it again")
        # Ray installs signal handlers of its own when it starts, so ours go over them once more.
        with stop_on_signals(), ray_session(address, cpu_slots=slots) if pending else nullcontext(), stop_on_signals():
            for job in pending:
                placed = own[job.name] if own else place(job, inventory())
                run_job(job, placed, folders[job.name], output=output, display=display)
        display.table(read_summary(output))
        leave_report(output, display)
    display.say(f"run folder: {output}")


def leave_report(output: Path, display: Display) -> None:
    """Write the report; a report that fails does not undo a run that has finished."""
    try:
        write_report(output)
    except Exception as error:  # noqa: BLE001 whatever it is, the run has finished
        display.warn(f"no report: {type(error).__name__}: {error}")


def unfinished(jobs: Sequence[Job], output: Path) -> list[Job]:
    """The jobs that have not succeeded in this folder, and those that read the output of one that has not.

    Raises SpecError when another job of the same name has: its model is not overwritten.
    """
    pending: list[Job] = []
    problems: list[Problem] = []
    for job in jobs:
        folder = JobFolder(output, job)
        stale = {f"{JOB}{other.name}" for other in pending} & {model.uri for model in job.models().values()}
        if stale or not folder.finished():
            pending.append(job)
        elif changed := folder.changed_fields():
            message = f"is not what it was when the job finished in {folder.path}; use another --output, or --restart"
            problems += [Problem(f"{job.name}: {field}", message) for field in changed]
    if problems:
        raise SpecError(problems)
    return pending


@contextmanager
def only_run_in(output: Path) -> Iterator[None]:
    """Keep other runs out of the run folder while the block runs."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / ".lock").open("w")
    except OSError as error:
        raise EnvironmentProblem(f"--output {output}: cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EnvironmentProblem(f"--output {output}: another rlhf run is using this folder") from None
        yield


def run_job(job: Job, placed: Mapping, folders: dict[Role, str], *, output: Path, display: Display) -> None:
    """Run one job into its folder and add what it measured to summary.json."""
    folder = JobFolder(output, job)
    folder.begin()
    publisher = Publisher(job, folder, display)
    publisher.say(f"{job.spec.algorithm.name} on {placed_text(placed)}")
    with publisher.telling_the_end():
        require_one_vocabulary(job, folders)
        add_to_summary(output, job.name, on_ray(job, placed, folders, folder, publisher))


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
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the cleaning up
        raise Stopped(signal_number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
