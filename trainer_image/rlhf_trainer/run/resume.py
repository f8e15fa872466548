"""Resumption in a run folder: the unfinished jobs, and the checkpoint of each."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlhf_api import kubectl_yaml
from rlhf_api.chain import inputs_of
from rlhf_api.checks.resume import LENGTHS, changes, differing_paths, identity
from rlhf_api.files import document_of
from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_api.spec.watch import react
from rlhf_trainer.checkpoint import Checkpoint
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run.inputs import begin_hashing, editable_inputs
from rlhf_trainer.run.machine import environment
from rlhf_trainer.run_folder.evidence import EMPTY, MAX_ENTRIES, RUN, Document, changed_files, parsed
from rlhf_trainer.run_folder.folder import INPUTS, JOB_FILE, JobFolder, finished_jobs, now, own_number, reading


@dataclass(frozen=True, kw_only=True)
class Start:
    """Point from which an unfinished job runs: a checkpoint, or the beginning."""

    checkpoint: Checkpoint | None
    """Checkpoint from which the job resumes; None: the job starts from the beginning."""
    inputs: Mapping[str, str]
    """Identities of the jobs whose outputs the job reads, by name."""
    evidence: Document
    """Document of run.json for the attempt that begins."""
    begin_hashing: Callable[[JobFolder], Callable[[int], None]]
    """Function `inputs.begin_hashing` of the job."""
    last_step: int | None = None
    """Step after which a repetition ends (`rlhf reproduce`); the checkpoint is then another run's and only read."""
    warnings: Sequence[str] = ()
    """Sentences on files that have changed since the checkpoint, unless `spec.watch.changedCode` is Off."""


def from_the_start(jobs: Sequence[Job], output: Path) -> dict[str, Start]:
    """Return for every job, by name, a start without a checkpoint."""
    made = identities(jobs, output)
    return {job.name: start_of(job, output, None, inputs(job, made)) for job in jobs}


def unfinished(jobs: Sequence[Job], output: Path) -> dict[str, Start]:
    """Return the start of each job that has not succeeded in this folder, by name.

    A job starts over if another experiment has made its input since. SpecError if a job was begun here with a manifest
    that makes it another experiment, or with other files and `spec.watch.changedCode` is Fail.
    """
    made = identities(jobs, output)
    pending: dict[str, Start] = {}
    problems: list[Problem] = []
    for job in jobs:
        folder, read = JobFolder(output, job), inputs(job, made)
        newest = folder.newest_checkpoint()
        with reading(newest.uri if newest else folder.path):
            if not (newest or folder.finished()) or json.loads(folder.saved(INPUTS, newest)) != read:
                pending[job.name] = start_of(job, output, None, read)
                continue
            new_length, found = changed(job, folder, newest)
        problems += [problem.within(f"{job.name}: ") for problem in found]
        if new_length or not folder.finished():
            try:
                pending[job.name] = start_of(job, output, newest, read)
            except SpecError as error:
                problems += error.problems
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
    """Compare with the saved manifest: return (changed fields of the job's length, problems that forbid to resume)."""
    before, after = kubectl_yaml.read(folder.saved(JOB_FILE, newest), "")[0], document_of(job)
    with suppress(SpecError):  # adds the defaults of fields that an earlier version lacked
        before = document_of(Job.parse(before))
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


def start_of(job: Job, output: Path, checkpoint: Checkpoint | None, made: Mapping[str, str]) -> Start:
    """Return a start from a checkpoint; made: as `Start.inputs`. SpecError if `changedCode: Fail` finds a change."""
    own, before = editable_inputs(job, output), EMPTY
    if checkpoint:
        try:
            with reading(checkpoint.uri):
                before = parsed(checkpoint.text(RUN))
        except EnvironmentProblem as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # a checkpoint of an earlier version lacks the file
                raise
    sentence = "is not what it was at the checkpoint; the next steps use what it is now"
    changed = [f"{name} {sentence}" for name in changed_files(before["read"], own)]
    warnings = react(job.spec.watch.changed_code, f"{job.name}: spec.watch.changedCode", changed)
    after = checkpoint.step if checkpoint else 0
    attempt = {"attempt": own_number(), "began": now(), "after": after, **environment()}
    return Start(
        checkpoint=checkpoint,
        inputs=made,
        evidence=Document(attempts=[*before["attempts"], attempt][-MAX_ENTRIES:], read=own, made=before["made"]),
        begin_hashing=partial(begin_hashing, job),
        warnings=warnings,
    )
