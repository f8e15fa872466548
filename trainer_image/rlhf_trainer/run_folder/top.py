"""`rlhf top`: table of the jobs of run folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from rlhf_api.problems import Problem, SpecError
from rlhf_api.status import Status
from rlhf_planning.job_table import JobLine, show
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run_folder.attempt import STATUS, owner
from rlhf_trainer.run_folder.folder import JOB_FILE, read_job
from rlhf_trainer.run_folder.lock import is_running

RUNS = Path("runs")
DIED, DAMAGED = "Died", "Damaged"
"""Words shown instead of a job's phase: the run's process is gone although Running; status.json cannot be read."""


def show_jobs(folders: Sequence[Path], *, once: bool) -> None:
    """Show a table of the jobs of run folders, by default of all below runs/. SpecError for another folder."""
    for folder in folders:
        if not any(folder.glob(f"*/{JOB_FILE}")):
            raise SpecError([Problem(str(folder), "is no run folder: no job has begun in it")])
    nothing = "no job has begun in a folder below runs/; name other run folders: rlhf top RUN_DIR"
    show(lambda: list(_jobs(folders or sorted(RUNS.glob("*")))), nothing, once=once, passing=OSError)


def _jobs(folders: Sequence[Path]) -> Iterator[JobLine]:
    for folder in folders:
        files = sorted(folder.glob(f"*/{JOB_FILE}"), key=lambda file: (file.stat().st_mtime, file))
        for file in files:
            readable = read_status(file.parent)
            status = readable or Status()
            has_died = status.phase == "Running" and owner(folder) is None and not is_running(folder)  # not in a pod
            yield JobLine(
                name=f"{folder.name}/{file.parent.name}" if len(folders) > 1 else file.parent.name,
                algorithm=_algorithm(file, file.stat().st_mtime),
                phase=DIED if has_died else status.phase if readable else DAMAGED,
                status=status,
                began=status.start_time,
            )


def read_status(job_folder: Path) -> Status | None:
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
