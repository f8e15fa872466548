"""Runs the jobs of a manifest in dependency order, on one Ray, into one run folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_mapper.mapping import Inventory, Mapping
from rlhf_mapper.place import place
from rlhf_trainer.checkpoint.store import Checkpoint
from rlhf_trainer.run.checkpoints import KeptCheckpoints
from rlhf_trainer.run.display import Display
from rlhf_trainer.run.folder import SUMMARY, JobFolder, add_to_summary, model_folders, read_summary
from rlhf_trainer.run.lock import only_run_in
from rlhf_trainer.run.publisher import Publisher
from rlhf_trainer.run.resume import unfinished
from rlhf_trainer.run.session import inventory, ray_session
from rlhf_trainer.run.stage import run_stage
from rlhf_trainer.run.stopping import StopSignals
from rlhf_trainer.run.vocabulary import require_one_vocabulary
from rlhf_trainer.run.wiring import RayRuntime


def run_file(manifest: Path, *, output: Path, overrides: Sequence[str], restart: bool, address: str | None) -> None:
    """Run every job of the manifest: from its newest checkpoint on, and not again if it has succeeded in this folder.

    Raises SpecError, TrainerError or Stopped; the folder of the job that failed says why.
    """
    jobs = load(manifest, overrides)
    folders = {job.name: model_folders(job, output) for job in jobs}
    here = Inventory(gpus_per_machine=(torch.cuda.device_count(),))
    address = address or os.environ.get("RAY_ADDRESS")
    own = {job.name: place(job, here) for job in jobs} if not address else {}
    slots = max((sum(pool.size for pool in mapping.pools) for mapping in own.values()), default=0)
    display = Display()
    stop = StopSignals(display.say)
    with only_run_in(output):
        if restart:
            (output / SUMMARY).unlink(missing_ok=True)
        pending = dict.fromkeys(job.name for job in jobs) if restart else unfinished(jobs, output)
        for job in jobs:
            if job.name not in pending:
                display.say(f"{job.name}: already finished in {output / job.name}; --restart runs it again")
        # Ray installs signal handlers of its own when it starts, so ours go over them once more.
        with stop.heard(), ray_session(address, cpu_slots=slots) if pending else nullcontext(), stop.heard():
            for job in [job for job in jobs if job.name in pending]:
                placed = own[job.name] if own else place(job, inventory())
                folder = JobFolder(output, job)
                folder.begin(pending[job.name])
                run_job(job, placed, folders[job.name], folder, display, stop=stop, resumed=pending[job.name])
        display.table(read_summary(output))
    display.say(f"run folder: {output}")


def run_job(
    job: Job,
    placed: Mapping,
    folders: dict[Role, str],
    folder: JobFolder,
    display: Display,
    *,
    stop: StopSignals,
    resumed: Checkpoint | None,
) -> None:
    """Run one job into its folder and add what it measured to summary.json."""
    publisher = Publisher(job, folder, display)
    publisher.say(f"{job.spec.algorithm.name} on {placed_text(placed)}")
    if resumed:
        publisher.say(f"goes on after step {resumed.step}, from {resumed.uri}")
    with publisher.telling_the_end():
        require_one_vocabulary(job, folders)
        runtime = RayRuntime(job, placed, folders)
        with runtime.running() as shape:
            for fact in shape.facts:
                publisher.say(fact)
            checkpoints = KeptCheckpoints(job, folder, runtime.models, rows=shape.rows, stop=stop, resumed=resumed)
            summary = run_stage(
                job,
                runtime,
                total_steps=job.total_steps_for(shape.rows),
                evaluation_rows=shape.evaluation_rows,
                model_folder=folder.model.resolve(),
                publisher=publisher,
                checkpoints=checkpoints,
            )
        add_to_summary(folder.path.parent, job.name, summary)


def placed_text(placed: Mapping) -> str:
    """The pools in a few words: `2 CPU slots (actor, critic)`."""
    return " | ".join(f"{pool.size} {placed.device} slots ({', '.join(pool.models)})" for pool in placed.pools)
