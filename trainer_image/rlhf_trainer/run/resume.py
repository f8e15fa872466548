"""Resumption in a run folder: the unfinished jobs, and the checkpoint of each."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from rlhf_api import kubectl_yaml
from rlhf_api.chain import inputs_of
from rlhf_api.checks.resume import LENGTHS, changes, differing_paths, identity, leaves
from rlhf_api.contract import ENTRYPOINT
from rlhf_api.files import document_of
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import Problem, SpecError
from rlhf_api.spec.watch import react
from rlhf_trainer.checkpoint import Checkpoint
from rlhf_trainer.data.uri import local_path
from rlhf_trainer.errors import DataError, EnvironmentProblem
from rlhf_trainer.run_folder.folder import FILES, INPUTS, JOB_FILE, JobFolder, finished_jobs, model_folders, reading

TEXT_FILES = (".jinja", ".json", ".model", ".py", ".txt")
"""Endings of the files in a model's folder from which tokens, templates, end tokens and the model's code are read."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Point from which an unfinished job runs: a checkpoint, or the beginning."""

    checkpoint: Checkpoint | None
    """Checkpoint from which the job resumes; None: the job starts from the beginning."""
    inputs: Mapping[str, str]
    """Identities of the jobs whose outputs the job reads, by name."""
    files: Mapping[str, str]
    """Hashes of the files, besides the data, that the job's fields name; keys: `field: name`, without a folder."""
    warnings: Sequence[str] = ()
    """Sentences on files that have changed since the checkpoint, unless `spec.watch.changedCode` is Off."""


def from_the_start(jobs: Sequence[Job], output: Path) -> dict[str, Start]:
    """Return for every job, by name, a start without a checkpoint."""
    made = identities(jobs, output)
    return {job.name: _start(job, output, None, inputs(job, made)) for job in jobs}


def unfinished(jobs: Sequence[Job], output: Path) -> dict[str, Start]:
    """Return the start of each job that has not succeeded in this folder, by name.

    A job starts over if another experiment made an input. SpecError if a job was begun here with a manifest that makes
    it another experiment, or with other files and `spec.watch.changedCode` is Fail.
    """
    made = identities(jobs, output)
    pending: dict[str, Start] = {}
    problems: list[Problem] = []
    for job in jobs:
        folder, read = JobFolder(output, job), inputs(job, made)
        newest = folder.newest_checkpoint()
        with reading(newest.uri if newest else folder.path):
            if not (newest or folder.finished()) or json.loads(folder.saved(INPUTS, newest)) != read:
                pending[job.name] = _start(job, output, None, read)
                continue
            new_length, found = changed(job, folder, newest)
        problems += [problem.within(f"{job.name}: ") for problem in found]
        if new_length or not folder.finished():
            try:
                pending[job.name] = _start(job, output, newest, read)
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
    """Return (changed fields of the job's length, problems that bar the job from going on), by the saved manifest."""
    before, after = kubectl_yaml.read(folder.saved(JOB_FILE, newest), "")[0], document_of(job)
    with suppress(SpecError):  # an earlier version wrote no fields that are new
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


def _start(job: Job, output: Path, checkpoint: Checkpoint | None, made: Mapping[str, str]) -> Start:
    """Return a start from a checkpoint; `made`: identities of the jobs whose outputs the job reads. SpecError."""
    found = [(f"{field}: {name}", file) for field, name, file in _files(job, output) if file.is_file()]
    files = before = {name: sha256(file.read_bytes()).hexdigest() for name, file in found}
    if checkpoint:
        before = _saved_files(checkpoint) or files
    differ = [name for name in sorted({*before, *files}) if before.get(name) != files.get(name)]
    changed = [f"{name} is not what it was at the checkpoint; the next steps use what it is now" for name in differ]
    warnings = react(job.spec.watch.changed_code, f"{job.name}: spec.watch.changedCode", changed)
    return Start(checkpoint=checkpoint, inputs=made, files=files, warnings=warnings)


def _saved_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Return files.json of a checkpoint; empty for one of an earlier version, which has no such file."""
    try:
        with reading(checkpoint.uri):
            return dict(json.loads(checkpoint.text(FILES)))
    except EnvironmentProblem as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return {}
        raise


def _files(job: Job, output: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield (field, name, file) of what turns texts into tokens, and of the user's functions."""
    models: Mapping[Role, str] = {}
    with suppress(DataError):  # a model that is not there is told when the job begins
        models = model_folders(job, output)
        if "://" in job.spec.data.chat_template:
            yield "spec.data.chatTemplate", "its file", local_path(job.spec.data.chat_template)
    for role, folder in models.items():
        field = f"spec.models.{job.spec.models.source_field(role)}"
        if job.models()[role].uri.startswith(("job://", "hf://")):  # an output of a job has an identity of its own
            continue
        yield from ((field, file.name, file) for file in Path(folder).glob("*") if file.suffix in TEXT_FILES)
    modules = [(field, value) for field, value in leaves(document_of(job)) if re.fullmatch(ENTRYPOINT, str(value))]
    if job.spec.algorithm.is_own:
        modules.append(("spec.algorithm.entrypoint", type(job.spec.algorithm).__module__))
    for field, value in modules:
        yield from ((field, file.name, file) for file in _module_files(value.partition(":")[0]))


def _module_files(module: str) -> list[Path]:
    """Return the files of a module, and of modules beside it that any of these files names; empty without a source."""
    places = [Path(folder, module.replace(".", "/") + end) for folder in sys.path for end in (".py", "/__init__.py")]
    for file in filter(Path.is_file, places):
        beside, found = {other.stem: other for other in file.parent.glob("*.py")}, [file]
        for each in found:
            words = set(re.findall(r"\w+", each.read_text(encoding="utf-8", errors="replace")))
            found += [other for name, other in beside.items() if name in words and other not in found]
        return sorted(found)
    return []
