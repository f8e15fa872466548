"""Resumption in a run folder: the unfinished jobs, and the checkpoint of each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_api import kubectl_yaml
from rlhf_api.chain import inputs_of
from rlhf_api.checks.resume import LENGTHS, changes, differing_paths, identity
from rlhf_api.files import document_of
from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_trainer.checkpoint import Checkpoint
from rlhf_trainer.run_folder.folder import INPUTS, JOB_FILE, JobFolder, finished_jobs, reading


@dataclass(frozen=True, kw_only=True)
class Start:
    """Point from which an unfinished job runs: a checkpoint, or the beginning."""

    checkpoint: Checkpoint | None
    """Checkpoint from which the job resumes; None: the job starts from the beginning."""
    inputs: Mapping[str, str]
    """Identities of the jobs whose outputs the job reads, by name."""


def from_the_start(jobs: Sequence[Job], output: Path) -> dict[str, Start]:
    """Return for every job, by name, a start without a checkpoint."""
    made = identities(jobs, output)
    return {job.name: Start(checkpoint=None, inputs=inputs(job, made)) for job in jobs}


def unfinished(jobs: Sequence[Job], output: Path) -> dict[str, Start]:
    """Return the start of each job that has not succeeded in this folder, by name.

    A job starts over if another experiment made an input. SpecError if a job was begun here with a manifest that makes
    it another experiment.
    """
    made = identities(jobs, output)
    pending: dict[str, Start] = {}
    problems: list[Problem] = []
    for job in jobs:
        folder, read = JobFolder(output, job), inputs(job, made)
        newest = folder.newest_checkpoint()
        with reading(newest.uri if newest else folder.path):
            if not (newest or folder.finished()) or json.loads(folder.saved(INPUTS, newest)) != read:
                pending[job.name] = Start(checkpoint=None, inputs=read)
                continue
            new_length, found = changed(job, folder, newest)
        problems += [problem.within(f"{job.name}: ") for problem in found]
        if new_length or not folder.finished():
            pending[job.name] = Start(checkpoint=newest, inputs=read)
    if problems:
        raise SpecError(problems)
    return pending


def identities(jobs: Sequence[Job], output: Path) -> dict[str, str]:
    """Return the identity of each job and of all finished jobs by name; jobs: each after the jobs that it reads."""
    made = {name: finished.identity for name, finished in finished_jobs(output).items()}
    for job in jobs:
        made[job.name] = identity(document_of(job), inputs(job, made))
    return made


def inputs(job: Job, made: Mapping[str, str]) -> dict[str, str]:
    """Return the identities of the jobs whose outputs a job reads, by name."""
    return {name: made[name] for name in sorted(inputs_of(job))}


def changed(job: Job, folder: JobFolder, newest: Checkpoint | None) -> tuple[list[str], list[Problem]]:
    """Return (changed fields of the job's length, problems that bar the job from going on), by the saved manifest."""
    before, after = kubectl_yaml.read(folder.saved(JOB_FILE, newest), "")[0], document_of(job)
    new_length = [field for field in differing_paths(before, after) if field in LENGTHS]
    if found := changes(before, after):
        return new_length, found
    instead = "use another --output, or --restart"
    if newest is None:
        sentence = f"is not what it was when the job finished, and no checkpoint is left; {instead}"
        return new_length, [Problem(field, sentence) for field in new_length]
    steps = job.total_steps_for(newest.state()["rows"])
    sentence = f"gives {steps} steps, but {newest.step} are done; {instead}"
    return new_length, [Problem("spec.training", sentence)] if steps < newest.step else []
