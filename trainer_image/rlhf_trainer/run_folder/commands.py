"""Commands `rlhf checkpoints` and `rlhf save-now` about a run folder, during the run or after it."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlhf_api.problems import Problem, SpecError
from rlhf_trainer.checkpoint import Checkpoint
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run_folder.attempt import STATUS, Attempt, Watch, own_attempt, read_exit, read_status, write_exit
from rlhf_trainer.run_folder.folder import (
    JOB_FILE,
    SAVE_REQUEST,
    SUMMARY,
    JobFolder,
    read_job,
    read_summary,
    reading,
    writing,
)
from rlhf_trainer.run_folder.lock import is_running

POLL_SECONDS = 0.2
KILLED = 128 + signal.SIGKILL


def job_folders(output: Path) -> list[JobFolder]:
    """Return the jobs of a run folder in the order in which they began. SpecError if there are none."""
    files = sorted(output.glob(f"*/{JOB_FILE}"), key=lambda file: (file.stat().st_mtime, file))
    if not files:
        raise SpecError([Problem(str(output), "is no run folder: no job has begun in it")])
    return [JobFolder(output, read_job(file)) for file in files]


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
            table.add_row(f"  {checkpoint.name}", size, _age_of(checkpoint), state)
        console.print(table if table.row_count else "  none")


def _best_step(folder: JobFolder, found: Sequence[Checkpoint]) -> int | None:
    """Return the best step by checkpoint.keepBest: from summary.json for a finished job, else the best so far."""
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


def _age_of(checkpoint: Checkpoint) -> str:
    if checkpoint.saved_at is None:
        return "-"
    seconds = (datetime.now(UTC) - checkpoint.saved_at).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def save_now(output: Path | None) -> str:
    """Request a checkpoint of the run that uses a folder, wait until it is whole, and return its URI.

    None means the folder below runs/ that a run is using. Raises SpecError if no run uses it, or several folders are in
    use, and EnvironmentProblem if the run ends first. A pod waits for this before it ends; there these are no errors.
    """
    attempt = own_attempt()
    if attempt is not None and output is not None:
        return _save_before_the_end(output, attempt)
    running = [output] if output else [folder for folder in sorted(Path("runs").glob("*")) if is_running(folder)]
    if len(running) != 1:
        names = ", ".join(map(str, running)) or "no folder below runs/"
        raise SpecError([Problem("RUN_DIR", f"is needed, for {names} is in use")])
    (folder,) = running
    if not is_running(folder):
        raise SpecError([Problem(str(folder), "no rlhf run is using this folder")])
    request = folder / SAVE_REQUEST
    request.touch()
    while request.exists():
        if not is_running(folder):
            raise EnvironmentProblem(f"{folder}: the run ended before it made the checkpoint")
        time.sleep(POLL_SECONDS)
    found = [newest for job in job_folders(folder) if (newest := job.checkpoints.newest()) and newest.saved_at]
    return max(found, key=lambda checkpoint: str(checkpoint.saved_at)).uri


def _save_before_the_end(output: Path, attempt: Attempt) -> str:
    """Wait until every step of this attempt so far is saved, or its trainer has ended; return a sentence.

    Other pods may request a checkpoint at the same time, so only the step of the newest checkpoint counts.
    """
    watch = Watch(output, attempt)
    if not watch.is_alive():
        return f"{output}: no trainer of attempt {attempt.number} is active, nothing to save"
    done, saved = _steps(output, attempt)
    if saved >= done:
        return f"{output}: every step of attempt {attempt.number} is saved"
    with writing(output):
        (output / SAVE_REQUEST).touch()
    while saved < done:
        time.sleep(POLL_SECONDS)
        alive = watch.is_alive()  # first: what is read after the end is the last word
        saved = _steps(output, attempt)[1]
        if saved < done and not alive:
            if watch.has_freed_its_lock() and read_exit(output, attempt) is None:
                write_exit(output, KILLED, reason="Killed", message="killed")  # other pods wait for it
            return f"{output}: the trainer has ended; step {saved} is saved"
    return f"{output}: step {saved} is saved"


def _steps(output: Path, attempt: Attempt) -> tuple[int, int]:
    """Return (steps done, steps saved) by the status of this attempt's job; zeros before its first step."""
    for file in output.glob(f"*/{STATUS}"):
        status = read_status(file.parent, attempt)
        if "progress" in status:
            return status["progress"]["step"], status.get("checkpoint", {}).get("step", 0)
    return 0, 0
