"""Files that a run writes into its run folder, which has a folder for each job."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, NamedTuple, ParamSpec

from rlhf_api import kubectl_yaml
from rlhf_api.chain import SCHEME, data_from_jobs, merged_models, read_inputs
from rlhf_api.checks.resume import identity
from rlhf_api.exit_codes import ExitCode
from rlhf_api.files import dump, load
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import legible, one_line
from rlhf_api.spec.data import DataSource, Rows
from rlhf_api.status import Failure, Metric, Progress, SavedState, Status
from rlhf_mapper.mapping import DeviceMapping, as_json
from rlhf_trainer.checkpoint import Checkpoint, CheckpointStore
from rlhf_trainer.data.uri import folder_or_name
from rlhf_trainer.errors import DataError, EnvironmentProblem, phase_after
from rlhf_trainer.hub import HUB, require_hub
from rlhf_trainer.run_folder.attempt import STATUS, from_json, mark, own_attempt, owner, replace
from rlhf_trainer.run_folder.evidence import EMPTY, RUN, Document, Entry, as_text, change, labelled, with_files
from rlhf_trainer.run_folder.lock import require_newest
from rlhf_trainer.run_folder.pace import Steps

P = ParamSpec("P")
MADE = ("model", "data")
"""Names that the folder of a job's output may have: `model` for weights, `data` for a data set."""
SUMMARY, METRICS, RANKS = "summary.json", "metrics.jsonl", "ranks.jsonl"
JOB_FILE, INPUTS, MAPPING = "job.yaml", "inputs.json", "mapping.json"
MAX_WARNINGS = 8
"""Most warnings that the status keeps."""
MAX_REASON = 300
"""Most characters of a library's error text that our error repeats."""
SAVE_REQUEST = "save-now"
"""Name of the file that requests a checkpoint of the running job; the job deletes the file after the checkpoint."""


def model_folders(job: Job, output: Path) -> dict[Role, str]:
    """Return the local folder of each model of a job, or its name on the hub. DataError if there is no such model."""
    folders: dict[Role, str] = {}
    for role, model in job.models().items():
        field = next(iter(merged_models(job)), f"models.{job.spec.models.source_field(role)}.uri")
        folders[role] = found_model(f"{job.name}: spec.{field}", model.uri, output)
    return folders


def found_model(field: str, uri: str, output: Path) -> str:
    """Return the `model_folder` of a field's URI. DataError, naming the field, if there is no such model."""
    if uri.startswith(HUB):
        require_hub(uri, field, "model")
    try:
        return model_folder(uri, output)
    except DataError as error:
        raise DataError(f"{field}: {error}") from error


def model_folder(uri: str, output: Path) -> str:
    """Return the local folder of a model by its URI, or the model's name on the Hugging Face Hub."""
    if uri.startswith(SCHEME):
        return str((output / uri.removeprefix(SCHEME) / "model").resolve())
    return folder_or_name(uri)


def read_summary(output: Path) -> dict[str, Any]:
    """Return summary.json of a run folder; empty if there is none yet."""
    path = output / SUMMARY
    with reading(path):
        return dict(from_json(path.read_text())) if path.is_file() else {}


def add_to_summary(output: Path, name: str, summary: Mapping[str, Any]) -> None:
    """Write the measurements of a job into summary.json of the run folder."""
    require_newest(output)
    everything = {**read_summary(output), name: dict(summary)}
    with writing(output / SUMMARY):
        replace(output / SUMMARY, json.dumps(everything, indent=2) + "\n")


def saved_state(checkpoint: Checkpoint) -> SavedState:
    """Return the entry for a whole checkpoint in a job's status: step, URI and time."""
    saved_at = checkpoint.saved_at or datetime.now(UTC)
    return SavedState(step=checkpoint.step, uri=checkpoint.uri, time=rfc3339(saved_at))


class FinishedJob(NamedTuple):
    """Job that has succeeded in a run folder and left an output."""

    algorithm: str
    identity: str
    """Hash of the experiment that made the output (`rlhf_api.checks.resume.identity`)."""


def finished_jobs(output: Path) -> dict[str, FinishedJob]:
    """Return the jobs that have succeeded in a run folder and left an output, by name."""
    found = {}
    for status in output.glob(f"*/{STATUS}"):
        job, inputs = (status.parent / name for name in (JOB_FILE, INPUTS))
        has_output = any((status.parent / folder).is_dir() for folder in MADE)
        if not (job.is_file() and inputs.is_file() and has_output):
            continue
        with reading(status.parent):
            if json.loads(status.read_text())["phase"] == "Succeeded":
                (document,) = kubectl_yaml.read(job.read_text(), "")
                made = identity(document, json.loads(inputs.read_text()))
                found[status.parent.name] = FinishedJob(document["spec"]["algorithm"]["name"], made)
    return found


def load_with_finished(output: Path, manifest: Path | str, overrides: Sequence[str]) -> list[Job]:
    """Return the jobs of a manifest; they may read results of finished jobs in the run folder `output`. SpecError."""
    return load(manifest, overrides, {name: job.algorithm for name, job in finished_jobs(output).items()})


def with_written_data(job: Job, output: Path) -> Job:
    """Return the job with file URIs, not job://, for data that earlier jobs wrote. DataError for unfinished data."""
    finished = finished_jobs(output)
    for field, name in data_from_jobs(job).items():
        if name not in finished:
            raise DataError(f"{job.name}: {field}.uri: {SCHEME}{name} has not been written; run its job first")

    def here(source: Rows) -> Rows:
        if not (isinstance(source, DataSource) and source.uri.startswith(SCHEME)):
            return source
        folder = output / source.uri.removeprefix(SCHEME) / "data"
        return source.model_copy(update={"uri": folder.resolve().as_uri()})

    return job.model_copy(update={"spec": job.spec.with_sources(here)})


def own_number() -> int | None:
    """Return the number of this process's attempt; None for a run without an operator."""
    own = own_attempt()
    return own.number if own else None


def now() -> str:
    """Return the current time in UTC (RFC 3339)."""
    return rfc3339(datetime.now(UTC))


def rfc3339(moment: datetime) -> str:
    """Format a time in UTC as Kubernetes does."""
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn errors of damaged files in the block into an EnvironmentProblem that names `path`."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = one_line(f"{type(error).__name__}: {error}", MAX_REASON)
        raise EnvironmentProblem(f"{path}: is not as a run left it: {reason}") from error


def read_job(file: Path) -> Job:
    """Return the job in a job.yaml that a run wrote. EnvironmentProblem if the file is damaged."""
    with reading(file):
        documents = kubectl_yaml.read(file.read_text(), "")
    if not documents:
        raise EnvironmentProblem(f"{file}: is not as a run left it: it is empty")
    with reading(file):
        return Job.parse(documents[0])


@contextmanager
def writing(path: Path, what: str = "cannot be written: ") -> Iterator[None]:
    """Turn OSError into EnvironmentProblem: `FILE or path: <what><reason>`; `what` is empty if the block also reads."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(f"{error.filename or path}: {what}{error.strerror or error}") from error


def writes(method: Callable[Concatenate[JobFolder, P], None]) -> Callable[Concatenate[JobFolder, P], None]:
    """Guard a writing method of JobFolder: EnvironmentProblem if the disk fails or a newer attempt owns the folder."""

    @wraps(method)
    def write(folder: JobFolder, /, *arguments: P.args, **options: P.kwargs) -> None:
        folder.require_ours()
        with writing(folder.path):
            method(folder, *arguments, **options)

    return write


class JobFolder:
    """Folder `DIR/<job>/`: resolved job, mapping, status, metrics, events, samples, and the output of the job."""

    def __init__(self, output: Path, job: Job) -> None:
        self.path = output / job.name
        self.made = self.path / job.spec.algorithm.makes
        self.save_request = output / SAVE_REQUEST
        self.best_by = job.spec.checkpoint.keep_best
        """Evaluation measure by which the best checkpoint is chosen; None if no best checkpoint is kept."""
        self._job = job
        self._status = Status(phase="Pending", attempt=own_number())
        self._steps = Steps()

    def finished(self) -> bool:
        """Whether the status says that a job of this name succeeded, and its output folder is there."""
        status = self.path / STATUS
        with reading(status):
            return status.is_file() and self.made.is_dir() and json.loads(status.read_text())["phase"] == "Succeeded"

    @property
    def checkpoints(self) -> CheckpointStore:
        """Return the store of the job's checkpoints: `checkpoints` in this folder, or STORAGE/RUN/JOB.

        STORAGE is `checkpoint.storage`, if set; RUN is the name of the run folder, JOB the name of the job.
        """
        storage = self._job.spec.checkpoint.storage
        if storage is None:
            return CheckpointStore(str(self.path.resolve() / "checkpoints"))
        return CheckpointStore(f"{storage.rstrip('/')}/{self.path.resolve().parent.name}/{self._job.name}")

    def newest_checkpoint(self) -> Checkpoint | None:
        """Return the newest whole checkpoint at the manifest's address or at that of the earlier run in this folder."""
        stores = [self.checkpoints]
        if (self.path / JOB_FILE).is_file():
            stores.append(JobFolder(self.path.parent, read_job(self.path / JOB_FILE)).checkpoints)
        found = [newest for store in stores if (newest := store.newest())]
        return max(found, key=lambda checkpoint: checkpoint.step, default=None)

    def saved(self, name: str, checkpoint: Checkpoint | None) -> str:
        """Return the text of the file JOB_FILE or INPUTS from a checkpoint; without one, from this folder."""
        return checkpoint.text(name) if checkpoint else (self.path / name).read_text()

    @writes
    def clear(self) -> None:
        """Delete the job's folder, and the job's checkpoints wherever they are."""
        self.checkpoints.clear()
        shutil.rmtree(self.path, ignore_errors=True)

    @writes
    def begin(
        self,
        checkpoint: Checkpoint | None,
        *,
        inputs: Mapping[str, str],
        evidence: Document = EMPTY,
        mapping: DeviceMapping | None = None,
    ) -> None:
        """Prepare the job's folder for a run from the start or a checkpoint; metrics of later steps are deleted.

        inputs, evidence: as in `run.resume.Start`; the job's checkpoints contain both.
        """
        saved = saved_state(checkpoint) if checkpoint else None
        texts = {METRICS: checkpoint.text(METRICS)} if checkpoint else {}
        texts |= {INPUTS: json.dumps(dict(inputs)) + "\n", RUN: as_text(evidence), JOB_FILE: dump(self._job)}
        texts |= {MAPPING: json.dumps(as_json(mapping), indent=2) + "\n"} if mapping else {}
        if not checkpoint:
            self.clear()
        self.path.mkdir(parents=True, exist_ok=True)
        if self._job.spec.algorithm.makes == "data":
            self.made.mkdir(exist_ok=True)
        self._write_status(texts, phase="Running", start_time=now(), checkpoint=saved, inputs=read_inputs(self._job))
        if self._job.spec.algorithm.is_own:
            self._keep_algorithm(1 + (checkpoint.step if checkpoint else 0))

    def _keep_algorithm(self, first_step: int) -> None:
        """Copy the source of the job's own algorithm, unless the last copy is the same."""
        last = max(self.path.glob("algorithm-from-*.py"), default=None)
        text = Path(str(sys.modules[type(self._job.spec.algorithm).__module__].__file__)).read_bytes()
        if not last or last.read_bytes() != text:
            (self.path / f"algorithm-from-{first_step:06d}.py").write_bytes(text)

    def texts_for_checkpoint(self, *, up_to: int) -> dict[str, str]:
        """Return the texts of this folder's files that belong to the checkpoint of step `up_to`, by file name."""
        lines = (self.path / METRICS).read_text().splitlines(keepends=True)
        records = "".join(line for line in lines if json.loads(line)["step"] <= up_to)
        return {METRICS: records, **{name: (self.path / name).read_text() for name in (JOB_FILE, INPUTS, RUN)}}

    @writes
    def record_checkpoint(self, checkpoint: Checkpoint, sums: Mapping[str, str] = MappingProxyType({})) -> None:
        """Record a whole checkpoint in the status and in run.json; sums: `Entry.files` of a checkpoint."""
        entry = Entry(name="checkpoint", kind="checkpoint", uri=checkpoint.uri, step=checkpoint.step)
        self.add_evidence(made=with_files(entry, sums))
        self._write_status(checkpoint=saved_state(checkpoint))
        self.event(f"checkpoint of step {checkpoint.step}: {checkpoint.uri}")

    def add_evidence(self, *, read: Iterable[Entry] | None = None, made: Entry | None = None) -> Document:
        """Change run.json as `evidence.change` does. EnvironmentProblem if a newer attempt owns the folder."""
        self.require_ours()
        return change(self.path / RUN, read=read, made=made)

    def require_ours(self) -> None:
        """Raise EnvironmentProblem if a newer attempt of the job owns the run folder now."""
        require_newest(self.path.parent)

    @writes
    def adopt(self) -> None:
        """Take over the status of an earlier attempt in which the job has succeeded."""
        with reading(self.path / STATUS):
            self._status = Status.model_validate_json((self.path / STATUS).read_text(), by_alias=True, by_name=False)
        self._write_status(attempt=own_number())

    @writes
    def event(self, message: str) -> None:
        """Add a line with the time and a message to the job's events.log."""
        with (self.path / "events.log").open("a") as file:
            file.write(f"{now()} {legible(message)}\n")

    @writes
    def warn(self, message: str) -> None:
        """Add a warning to the job's events.log and to the status."""
        self.event(message)
        self._write_status(warnings=(*self._status.warnings, message)[-MAX_WARNINGS:])

    @writes
    def note(self, /, **fields: Any) -> None:
        """Write fields of the status, such as `links`."""
        self._write_status(**fields)

    @writes
    def record(self, record: Mapping[str, float], *, total_steps: int, stage: str, ranks: object = None) -> None:
        """Add the metrics of a step to metrics.jsonl and to the status, and the ranks' fingerprints to ranks.jsonl."""
        lines = {METRICS: json.dumps(dict(record), allow_nan=False)}
        lines |= {RANKS: json.dumps({"step": record["step"], "calls": ranks})} if ranks else {}
        for name, line in lines.items():
            with (self.path / name).open("a") as file:
                file.write(f"{line}\n")
        shown = tuple(Metric(name=name, value=f"{record[name]:.6g}") for name in sorted(record) if name != "step")
        step, seconds, tokens = int(record["step"]), record.get("time/step"), record.get("tokens_per_second")
        progress = Progress(
            step=step,
            total_steps=total_steps,
            stage=stage,
            step_seconds=None if seconds is None else round(seconds, 3),
            tokens_per_second=None if tokens is None else round(tokens, 1),
            remaining_seconds=None if seconds is None else round(seconds * (total_steps - step)),
            last_step_time=now(),
            pace=self._steps.pace(record),
        )
        self._write_status(progress=progress, metrics=shown)

    @writes
    def note_measures(self, measured: Mapping[str, Any]) -> None:
        """Write measures of the evaluation after the last step to the metrics of the status."""
        known = {each.name: each.value for each in self._status.metrics}
        known |= {f"evaluation/{name}": f"{value:.6g}" for name, value in measured.items() if value is not None}
        self._write_status(metrics=tuple(Metric(name=name, value=value) for name, value in known.items()))

    @writes
    def write_held_out(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows of held-out prompts and responses to samples.jsonl, if there are any."""
        if not (rows := list(rows)):
            return
        text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        (self.path / "samples.jsonl").write_text(text)

    @writes
    def succeed(self) -> None:
        """Record in the status that the job succeeded, and the URI of its output, which gets labels."""
        read, made = labelled(self._job, self.made)
        self._write_status(phase="Succeeded", completion_time=now(), inputs=read, output=made)

    def fail(self, *, reason: str, exit_code: ExitCode, message: str, host: str = "") -> None:
        """Record in the status why the run ended, if the disk permits; host: the machine that is to blame."""
        if not self.path.is_dir():
            return
        with suppress(OSError, EnvironmentProblem):  # an error here must not hide the reason in the terminal
            self.require_ours()
            self._write_status(
                phase=phase_after(reason),
                completion_time=now(),
                last_failure=Failure(
                    reason=reason,
                    exit_code=exit_code,
                    message=message,
                    attempt=own_number(),
                    pod=host or None,
                    time=now(),
                ),
            )
            self.event(message)

    def _write_status(self, texts: Mapping[str, str] = MappingProxyType({}), **changes: Any) -> None:
        """Write `texts` (file name -> text), then status.json with `changes`; a reader never sees half of a file."""
        self._status = self._status.model_copy(update=changes)
        for name, text in {**texts, STATUS: json.dumps(legible(self._status.document()), indent=2) + "\n"}.items():
            replace(self.path / name, text)
        own = own_attempt()
        if own and own != owner(self.path):
            mark(self.path, own)
