"""`rlhf reproduce`: repeats steps of a job in a new run folder, and compares the results with the original ones."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_api.chain import inputs_of
from rlhf_api.files import document_of
from rlhf_api.job import Job
from rlhf_api.own_code import add_search_path
from rlhf_api.problems import Problem, SpecError
from rlhf_mapper.mapping import as_json
from rlhf_planning.comparison import differences
from rlhf_trainer.checkpoint import Checkpoint
from rlhf_trainer.data.lines import are_rows, lines_of
from rlhf_trainer.data.uri import local_path
from rlhf_trainer.errors import ConfigError, DataError, NumericsError, Paused
from rlhf_trainer.hub import HUB
from rlhf_trainer.report.run_record import mapping_line
from rlhf_trainer.run.chain import run_file
from rlhf_trainer.run.inputs import Source, hashed, sources_of
from rlhf_trainer.run.machine import environment, gpu_count
from rlhf_trainer.run.placement import place_job
from rlhf_trainer.run.resume import identities, inputs, start_of
from rlhf_trainer.run_folder.attempt import read_object
from rlhf_trainer.run_folder.commands import job_folders
from rlhf_trainer.run_folder.evidence import ATTEMPT, RUN, Document, Entry, attempt_of, changed_files, parsed
from rlhf_trainer.run_folder.folder import (
    JOB_FILE,
    MAPPING,
    METRICS,
    JobFolder,
    finished_jobs,
    load_with_finished,
    read_job,
    reading,
    writing,
)
from rlhf_trainer.run_folder.repeated import WEIGHTS, by_step, compare

OWN_SETTINGS = (
    *("outputs={}", "watch.changedCode='Off'", "watch.causes='Off'", "rollout.weightStore=null"),
    "checkpoint={keepLast: 1, everySteps: 1}",
)
"""Settings of a repetition: it reports to no tracker, writes only its own folder, and saves each step's weights."""
NO_INPUTS = ("metadata.", "spec.outputs", "spec.watch", "spec.rollout.weightStore", "spec.checkpoint")
NO_FACTS = (*ATTEMPT, "memory_gib")
"""Fields of the manifest, and facts of an attempt in run.json, that do not affect the results of a step."""


class Original(NamedTuple):
    """Job of an existing run folder whose steps are to be repeated."""

    folder: JobFolder
    job: Job
    manifest: str
    """Text of job.yaml."""
    document: Document
    """Content of run.json."""
    steps: Sequence[int]
    checkpoint: Checkpoint | None
    """Checkpoint before the steps; None: they are the first."""


def reproduce(
    run: Path, *, job: str | None, count: int, after: int | None, sets: Sequence[str], say: Callable[[str], None]
) -> None:
    """Repeat steps of a job of the folder `run` in `<run>-reproduced`, and say whether both runs are equal.

    The folder `run` is only read. job: by default the one that began last. count: number of steps. after: step of the
    checkpoint to begin at; None: the start. sets: changes of the manifest.
    Raises SpecError for a missing run, job, step or checkpoint, and DataError for a missing input. Raises ConfigError
    if inputs differ, even if the steps are equal; else NumericsError if the steps differ.
    """
    original = _original(run, job, count, after)
    target = run.resolve().with_name(f"{run.resolve().name}-reproduced")
    if target.exists():
        raise SpecError([Problem(str(target), "is there already; move it away")])
    for entry in original.document["read"]:
        with suppress(DataError):  # the import reports code that is missing
            add_search_path(local_path(entry["uri"]))
    name, steps, overrides = original.job.name, original.steps, [*sets, *OWN_SETTINGS]
    (again,) = load_with_finished(run, original.manifest, overrides)
    sources = _sources(again, run)
    differing = list(_differing_inputs(original, again, [*map(hashed, sources)]))
    say(f"{name}: makes steps {steps[0]} to {steps[-1]} of {run} again in {target}")
    for each in differing:
        say(f"{name}: differs: {each}")
    known = {entry["name"] for entry in original.document["read"] if "sha256" in entry}
    if unhashed := [entry["name"] for entry, _ in sources if entry["name"] not in known]:  # the run was killed early
        say(f"{name}: {RUN} lacks hashes of {', '.join(unhashed)}, so these inputs may differ")
    _make_again(original, again, target, overrides)
    with reading(run):
        found, counts = compare(original.folder.path, target / name, steps)
    amounts = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    unchecked = "" if counts[WEIGHTS] else "; weights are not compared, as the run has no checkpoint of these steps"
    sentence = found or f"steps {steps[0]} to {steps[-1]} are equal: {amounts}{unchecked}"
    if differing:
        raise ConfigError(f"{name}: inputs differ ({len(differing)}): {sentence}")
    if found:
        raise NumericsError(f"{name}: {sentence}")
    say(f"{name}: {sentence}")


def _make_again(original: Original, again: Job, target: Path, overrides: Sequence[str]) -> None:
    """Run the job's steps in the new folder `target`, in which outputs of other jobs are links."""
    run = original.folder.path.parent
    with writing(target):
        target.mkdir(parents=True)
        for name in inputs_of(again):
            (target / name).symlink_to((run / name).resolve())
    start = start_of(again, run, original.checkpoint, inputs(again, identities([again], run)))
    starts = {again.name: replace(start, last_step=original.steps[-1])}
    with suppress(Paused):  # ends the run after `last_step`
        run_file(original.manifest, output=target, overrides=overrides, starts=starts)


def _original(run: Path, job: str | None, count: int, after: int | None) -> Original:
    """Return the job to repeat. SpecError if a run, a job, a step or a checkpoint is missing."""
    folders = {folder.path.name: folder for folder in job_folders(run)}
    name = job or [*folders][-1]
    if name not in folders:
        raise SpecError([Problem("--job", f"no job {name} has begun in {run}; there are {', '.join(folders)}")])
    folder = folders[name]
    if not (file := folder.path / RUN).is_file():
        raise SpecError([Problem(str(file), "is not there: the job began with an earlier version")])
    with reading(file):
        document = parsed(file.read_bytes())
    begin, whole = after or 0, {each.step: each for each in folder.checkpoints.all() if each.is_whole}
    if begin and begin not in whole:
        there = ", ".join(map(str, whole)) or "none"
        sentence = f"{name} has no whole checkpoint of that step; there are: {there}"
        raise SpecError([Problem(f"--from {begin}", sentence)])
    steps = [step for step in sorted(by_step(folder.path / METRICS)) if begin < step <= begin + count]
    if not steps:
        raise SpecError([Problem(str(folder.path), f"no step{f' after {begin}' * bool(begin)} has ended")])
    first, manifest = read_job(folder.path / JOB_FILE), (folder.path / JOB_FILE).read_text()
    if gone := sorted(inputs_of(first) - finished_jobs(run).keys()):
        raise DataError(f"{name}: reads the output of {', '.join(gone)}, which is not in {run} any more")
    return Original(folder, first, manifest, document, steps, whole.get(begin))


def _sources(again: Job, run: Path) -> list[Source]:
    """Return the inputs of a job with their files. DataError for missing files."""
    sources = list(sources_of(again, run))
    for entry, files in sources:
        if not (files or entry["uri"].startswith(HUB)):
            gone = f"{entry['uri']} is not there any more; --set may name its new place"
            raise DataError(f"{again.name}: {entry['name']}: {gone}")
    return sources


def _differing_inputs(original: Original, again: Job, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a sentence for each input that differs: fields, files (`entries`), versions, machine and layout."""
    read, found = ({each["name"]: each for each in items} for items in (original.document["read"], entries))
    unread = Entry(name="", kind="data", uri="")
    for path, sentence in _changes(document_of(original.job), document_of(again)).items():
        name = path.removesuffix(".uri")
        was, new = read.get(name, unread), found.pop(name, unread)  # equal files in a new place are no difference
        if not path.startswith(NO_INPUTS) and new.get("sha256", "") != was.get("sha256"):
            yield sentence + _first_line(was["uri"], new["uri"])
    yield from (f"{name} is not what it was" for name in changed_files(original.document["read"], found.values()))
    ran_on, unknown = attempt_of(original.document, original.steps[0]), "run.json does not say on what these steps ran"
    facts = _changes(ran_on, environment()) if ran_on else {"": unknown}
    yield from (sentence for name, sentence in facts.items() if name not in NO_FACTS)
    placed = read_object(original.folder.path / MAPPING)
    if placed and "RAY_ADDRESS" not in os.environ:
        now = mapping_line(as_json(place_job(again, (gpu_count(),), [again], original.folder.path.parent).mapping))
        with reading(original.folder.path / MAPPING):
            yield from _changes({"the layout": mapping_line(placed)}, {"the layout": now}).values()


def _first_line(before: str, after: str) -> str:
    """Return a clause that names the first line in which two data files differ; empty if unknown."""
    with suppress(DataError, OSError):
        files = [local_path(uri) for uri in (before, after)]
        if all(map(are_rows, files)):
            rows = (((line.number, line.text) for line in lines_of(file)) for file in files)
            differing = (other or one for one, other in zip_longest(*rows) if one != other)
            return next((f"; line {number} is the first that differs" for number, _ in differing), "")
    return ""


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Return a sentence for each field that differs between two documents, by the field's path."""
    rows = differences([before, after])
    return {path: f"{path} is {now}, was {was}" for path, (was, now), _ in rows}
