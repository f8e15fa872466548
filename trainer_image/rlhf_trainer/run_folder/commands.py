"""Commands `rlhf checkpoints`, `save-now`, `logs` and `top` about run folders, during a run or after it."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_api.problems import Problem, SpecError, suggestion
from rlhf_api.status import Status
from rlhf_planning.job_table import JobLine, age, show
from rlhf_trainer.checkpoint import Checkpoint
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run_folder.attempt import (
    STATUS,
    AttemptId,
    Watch,
    own_attempt,
    owner,
    read_exit,
    read_status,
    write_exit,
)
from rlhf_trainer.run_folder.folder import (
    JOB_FILE,
    SAVE_REQUEST,
    SUMMARY,
    JobFolder,
    read_job,
    read_summary,
    reading,
    rfc3339,
    writing,
)
from rlhf_trainer.run_folder.lock import is_running

POLL_SECONDS = 0.2
KILLED = 128 + signal.SIGKILL
EVENTS, STACKS = "events.log", "stacks.txt"
RUNS = Path("runs")
DIED, DAMAGED = "Died", "Damaged"
"""Words shown instead of a job's phase: the run died while the phase was Running; status.json cannot be read."""


def job_folders(output: Path) -> list[JobFolder]:
    """Return the jobs of a run folder in the order in which they began. SpecError if there are none."""
    if not (files := job_files(output)):
        raise SpecError([Problem(str(output), "is no run folder: no job has begun in it")])
    return [JobFolder(output, read_job(file)) for file in files]


def job_files(output: Path) -> list[Path]:
    """Return job.yaml of each job of a run folder, in the order in which they were written."""
    return sorted(output.glob(f"*/{JOB_FILE}"), key=lambda file: (file.stat().st_mtime, file))


def show_checkpoints(output: Path) -> None:
    """Print every checkpoint of a run folder: step, size, age, whether it is whole, and which is the best."""
    console = Console(soft_wrap=True, highlight=False)
    for folder in job_folders(output):
        store = folder.checkpoints
        console.print(f"{folder.path.name}: {store.uri}", markup=False)
        table = Table("", "size", "age", "state", box=None, pad_edge=False)
        found = store.all()
        best = _best_step(folder, found)
        for checkpoint in found:
            size = f"{checkpoint.bytes / 1e6:,.1f} MB"
            state = checkpoint.problem or (f"whole, best by {folder.best_by}" if checkpoint.step == best else "whole")
            seconds = (datetime.now(UTC) - saved).total_seconds() if (saved := checkpoint.saved_at) else None
            table.add_row(f"  {checkpoint.name}", size, age(seconds), state)
        console.print(table if table.row_count else "  none")


def _best_step(folder: JobFolder, found: Sequence[Checkpoint]) -> int | None:
    """Return the step of the best checkpoint (checkpoint.keepBest), in a running job the best so far; None: no best."""
    newest = next((each for each in reversed(found) if each.is_whole), None)
    if not (folder.best_by and newest):
        return None
    if folder.finished():
        with reading(folder.path.parent / SUMMARY):
            step = read_summary(folder.path.parent).get(folder.path.name, {}).get("best_step")
            return None if step is None else int(step)
    with reading(newest.uri):
        best = newest.state().get("best")
        return int(best[0]) if best and best[2] == folder.best_by else None


def save_now(output: Path) -> str:
    """Request a checkpoint of the run that uses a folder, wait until it is whole, and return its URI.

    Raises SpecError if no run uses the folder, and EnvironmentProblem if the run ends first. In a pod, whose preStop
    hook waits for the checkpoint, these are no errors.
    """
    if attempt := own_attempt():
        return _save_before_the_end(output, attempt)
    if not is_running(output):
        raise SpecError([Problem(str(output), "no rlhf run is using this folder")])
    request = output / SAVE_REQUEST
    request.touch()
    while request.exists():
        if not is_running(output):
            raise EnvironmentProblem(f"{output}: the run ended before it made the checkpoint")
        time.sleep(POLL_SECONDS)
    found = [newest for job in job_folders(output) if (newest := job.checkpoints.newest()) and newest.saved_at]
    return max(found, key=lambda checkpoint: str(checkpoint.saved_at)).uri


def _save_before_the_end(output: Path, attempt: AttemptId) -> str:
    """Wait until every step of this attempt so far is saved, or its trainer has ended; return a sentence about it."""
    watch = Watch(output, attempt)
    if not watch.is_alive():
        return f"{output}: no trainer of attempt {attempt.number} is active, nothing to save"
    done, saved = _steps(output, attempt)
    if saved >= done:
        return f"{output}: every step of attempt {attempt.number} is saved"
    with writing(output):
        (output / SAVE_REQUEST).touch()
    while saved < done:  # other pods may request a checkpoint, too: only the step of the newest one counts
        time.sleep(POLL_SECONDS)
        alive = watch.is_alive()  # checked first: a status read after the end is final
        saved = _steps(output, attempt)[1]
        if saved < done and not alive:
            if watch.has_freed_its_lock() and read_exit(output, attempt) is None:
                write_exit(output, KILLED, reason="Killed", message="killed")  # other pods wait for exit.json
            return f"{output}: the trainer has ended; step {saved} is saved"
    return f"{output}: step {saved} is saved"


def _steps(output: Path, attempt: AttemptId) -> tuple[int, int]:
    """Return (steps done, steps saved) by the status of this attempt's job; zeros before its first step."""
    for file in output.glob(f"*/{STATUS}"):
        status = read_status(file.parent, attempt)
        if "progress" in status:
            return status["progress"]["step"], status.get("checkpoint", {}).get("step", 0)
    return 0, 0


def show_logs(output: Path, *, job: str | None, follow: bool) -> None:
    """Print the events of a run's jobs by time, and after a hang the stacks. SpecError if no such job has begun."""
    console, shown = Console(highlight=False, soft_wrap=True), dict[Path, int]()
    with suppress(KeyboardInterrupt):
        while True:
            new: list[tuple[str, Text]] = []
            folders = [folder.path for folder in job_folders(output)]
            chosen = [folder for folder in folders if job in (None, folder.name)]
            if not chosen:
                near = suggestion(str(job), [folder.name for folder in folders])
                raise SpecError([Problem(str(output), f"no job {job} has begun in it: {near}")])
            for folder in chosen:
                lines = list(_lines_of(folder))
                seen = shown.get(folder, 0)
                new += lines[seen if seen <= len(lines) else 0 :]  # a run that starts over begins a new log
                shown[folder] = len(lines)
            for _, text in sorted(new, key=lambda line: line[0]):
                console.print(text)
            if not follow:
                return
            time.sleep(POLL_SECONDS)


def _lines_of(folder: Path) -> Iterator[tuple[str, Text]]:
    """Yield (time, line) of the events of a job, and last the stacks of all ranks in the job's latest hang."""
    status = readable_status(folder)
    failure = status and status.last_failure
    for line in _text(folder / EVENTS).splitlines():
        moment, _, message = line.partition(" ")
        style = "red" if failure and message == failure.message else ""
        yield moment, Text.assemble((f"{moment} ", "dim"), f"{folder.name}: ", (message, style))
    if stacks := _text(folder / STACKS):
        written = rfc3339(datetime.fromtimestamp((folder / STACKS).stat().st_mtime, UTC))
        head = Text.assemble((f"{written} ", "dim"), f"{folder.name}: ", ("what each rank was doing:", "red"))
        yield written, Text("\n").join([head, Text(stacks.rstrip())])


def _text(file: Path) -> str:
    """Return the complete lines of a text file, without a last line still being written; empty if unreadable."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text[: text.rfind("\n") + 1]


def show_jobs(folders: Sequence[Path], *, once: bool) -> None:
    """Show a table of the jobs of run folders, by default of all below runs/. SpecError for a folder without jobs."""
    for folder in folders:
        if not job_files(folder):
            raise SpecError([Problem(str(folder), "is no run folder: no job has begun in it")])
    nothing = "no job has begun in a folder below runs/; name other run folders: rlhf top RUN_DIR"
    show(lambda: list(_jobs(folders or sorted(RUNS.glob("*")))), nothing, once=once, passing=OSError)


def _jobs(folders: Sequence[Path]) -> Iterator[JobLine]:
    for folder in folders:
        for file in job_files(folder):
            readable = readable_status(file.parent)
            status = readable or Status()
            yield JobLine(
                name=f"{folder.name}/{file.parent.name}" if len(folders) > 1 else file.parent.name,
                algorithm=_algorithm(file, file.stat().st_mtime),
                phase=shown_phase(folder, readable),
                status=status,
                began=status.start_time,
            )


def shown_phase(folder: Path, status: Status | None) -> str:
    """Return the phase of a job in a run folder, or DIED or DAMAGED; status: as `readable_status` returns it."""
    if not status:
        return DAMAGED
    has_died = status.phase == "Running" and owner(folder) is None and not is_running(folder)  # and it is in no pod
    return DIED if has_died else status.phase


def readable_status(job_folder: Path) -> Status | None:
    """Return the status in a job's folder; Pending before there is a status.json, None if it cannot be read."""
    try:
        return Status.model_validate_json((job_folder / STATUS).read_bytes(), by_alias=True, by_name=False)
    except FileNotFoundError:
        return Status()
    except (OSError, ValidationError):
        return None


@lru_cache(maxsize=1024)
def _algorithm(file: Path, _changed: float) -> str:
    try:
        return read_job(file).spec.algorithm.name
    except (EnvironmentProblem, SpecError):
        return "?"
