"""What can be asked of a run folder, during the run or after it: its checkpoints, and one more of them."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlhf_api import kubectl_yaml
from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_trainer.checkpoint.store import Checkpoint
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run.folder import JOB_FILE, SAVE_REQUEST, JobFolder
from rlhf_trainer.run.lock import is_running

POLL_SECONDS = 0.2


def job_folders(output: Path) -> list[JobFolder]:
    """The jobs of a run folder in the order in which they began; SpecError if there are none."""
    files = sorted(output.glob(f"*/{JOB_FILE}"), key=lambda file: (file.stat().st_mtime, file))
    if not files:
        raise SpecError([Problem(str(output), "is no run folder: no job has begun in it")])
    return [JobFolder(output, Job.parse(kubectl_yaml.read(file.read_text(), f"{file}: ")[0])) for file in files]


def show_checkpoints(output: Path) -> None:
    """Print every checkpoint of a run folder: step, size, age and whether it is whole."""
    console = Console(soft_wrap=True, highlight=False)
    for folder in job_folders(output):
        store = folder.checkpoints
        console.print(f"{folder.path.name}: {store.uri}", markup=False)
        table = Table("", "size", "age", "state", box=None, pad_edge=False)
        for checkpoint in store.all():
            size = f"{checkpoint.bytes / 1e6:,.1f} MB"
            table.add_row(f"  {checkpoint.name}", size, age_of(checkpoint), checkpoint.problem or "whole")
        console.print(table if table.row_count else "  none")


def age_of(checkpoint: Checkpoint) -> str:
    """How long a checkpoint has been whole, such as `4 min`; `-` for one that is not."""
    if checkpoint.saved_at is None:
        return "-"
    seconds = (datetime.now(UTC) - checkpoint.saved_at).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def save_now(output: Path | None) -> str:
    """Ask the run that uses a folder for a checkpoint, wait until it is whole, and say what there is now.

    Without a folder it is the one below runs/ that a run is using. Raises SpecError where none runs, or several, and
    EnvironmentProblem if the run ends first.
    """
    folder = output or _running_folder()
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


def _running_folder() -> Path:
    running = [folder for folder in sorted(Path("runs").glob("*")) if is_running(folder)]
    if len(running) != 1:
        names = ", ".join(map(str, running)) or "no folder below runs/"
        raise SpecError([Problem("RUN_DIR", f"is needed, for {names} is in use")])
    return running[0]
