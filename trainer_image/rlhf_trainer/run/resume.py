"""What is left to do in a run folder: which jobs have not finished, and where each goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_api import kubectl_yaml
from rlhf_api.files import dump
from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_api.resume import LENGTHS, changes, differing
from rlhf_trainer.checkpoint.store import Checkpoint
from rlhf_trainer.run.folder import JOB, JobFolder


def unfinished(jobs: Sequence[Job], output: Path) -> dict[str, Checkpoint | None]:
    """The jobs that have not succeeded in this folder: name -> the checkpoint to go on from, None for the start.

    A job that reads the output of one of them starts over. Raises SpecError when a job is another experiment than the
    one of that name which was begun here.
    """
    pending: dict[str, Checkpoint | None] = {}
    problems: list[Problem] = []
    for job in jobs:
        if {model.uri for model in job.models().values()} & {f"{JOB}{name}" for name in pending}:
            pending[job.name] = None
            continue
        folder = JobFolder(output, job)
        newest = folder.checkpoints.newest()
        if not (newest or folder.finished()):
            pending[job.name] = None
            continue
        before, after = (kubectl_yaml.read(text, "")[0] for text in (folder.saved_job(newest), dump(job)))
        new_length = [field for field in differing(before, after) if field in LENGTHS]
        found = changes(before, after) or (shortened(job, newest) if newest else without_checkpoint(new_length))
        problems += [problem.within(f"{job.name}: ") for problem in found]
        if new_length or not folder.finished():
            pending[job.name] = newest
    if problems:
        raise SpecError(problems)
    return pending


def shortened(job: Job, newest: Checkpoint) -> list[Problem]:
    """A problem if more steps are done than the job has now."""
    steps = job.total_steps_for(newest.state()["rows"])
    sentence = f"gives {steps} steps, but {newest.step} are done; use another --output, or --restart"
    return [Problem("spec.training", sentence)] if steps < newest.step else []


def without_checkpoint(fields: Sequence[str]) -> list[Problem]:
    """A problem for each changed length of a finished job that has no checkpoint to go on from."""
    sentence = "is not what it was when the job finished, and no checkpoint is left; use another --output, or --restart"
    return [Problem(field, sentence) for field in fields]
