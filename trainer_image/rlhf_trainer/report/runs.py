"""List of the runs below a folder, read from status.json of each job alone."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from rlhf_api.status import Progress, Status
from rlhf_planning.job_table import leading
from rlhf_trainer.report.page import rendered
from rlhf_trainer.run_folder.attempt import STATUS
from rlhf_trainer.run_folder.commands import readable_status, shown_phase
from rlhf_trainer.run_folder.folder import JOB_FILE, SUMMARY


@dataclass(frozen=True)
class RunRow:
    """Row of the list: a run, by the state of its first unfinished job, or else of its last job."""

    name: str
    """Path of the run folder below the listed folder."""
    path: Path
    note: str = ""
    """Sentence on what is missing or cannot be read; empty for a whole run folder."""
    phase: str = ""
    job: str = ""
    progress: Progress | None = None
    measure: tuple[str, float] | None = None
    """Name and value of the job's mean reward, or else of its first loss, in the latest step."""
    started: str = ""
    has_page: bool = False

    def matches(self, text: str) -> bool:
        """Whether each word of a search is in the run's name, job, algorithm, phase or note; case does not count."""
        stage = self.progress.stage if self.progress else ""
        within = f"{self.name} {self.job} {stage} {self.phase} {self.note}".lower()
        return all(word in within for word in text.lower().split())


ORDERS: Final[Mapping[str, Callable[[RunRow], Any]]] = {
    "run": lambda row: row.name,
    "status": lambda row: row.phase or None,
    "job": lambda row: row.job or None,
    "step": lambda row: row.progress.step if row.progress else None,
    "reward or loss": lambda row: row.measure,
    "started": lambda row: row.started or None,
}
"""Title of a column -> function that returns the value by which the column sorts, None if it is not known."""
NEWEST_FIRST: Final = "-started"


def list_runs(root: Path) -> dict[str, RunRow]:
    """Return the runs below a folder by name, or the folder itself if it is a run; no link is followed."""
    found, unreadable = dict[Path, RunRow](), list[OSError]()
    for place, folders, files in os.walk(root, onerror=unreadable.append):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        path, inside = Path(place), [Path(place, each) for each in folders]
        jobs = [each for each in inside if os.path.lexists(each / JOB_FILE) or os.path.lexists(each / STATUS)]
        if jobs or SUMMARY in files:
            folders.clear()
            found[path] = _row(_name(path, root), path, jobs)
            continue
        for link in (each for each in inside if each.is_symlink()):
            found[link] = RunRow(_name(link, root), link, f"is a link to {link.readlink()}, which is not followed")
    for error in unreadable:
        path = Path(error.filename)
        found[path] = RunRow(_name(path, root), path, f"cannot be read: {error.strerror}")
    return {row.name: row for row in found.values()}


def _name(path: Path, root: Path) -> str:
    name = path.relative_to(root).as_posix() if path != root else root.resolve().name
    return os.fsencode(name).decode(errors="replace")


def render(rows: Mapping[str, RunRow], root: Path, text: str, order: str, chosen: Collection[str]) -> str:
    """Return the HTML page with the chosen rows first, and then the rows that match `text`.

    order: key of ORDERS, after a `-` to sort from high to low.
    """
    order = order if order.removeprefix("-") in ORDERS else NEWEST_FIRST
    matching = in_order([row for row in rows.values() if row.name not in chosen and row.matches(text)], order)
    ahead = [rows[name] for name in chosen if name in rows]
    variables = {
        "root": root.resolve().name,
        "count": len(rows),
        "rows": ahead + matching,
        "text": text,
        "order": order,
        "orders": ORDERS,
        "chosen": chosen,
        "query": lambda **changes: urlencode({"text": text, "order": order, "run": chosen, **changes}, doseq=True),
    }
    return rendered("runs.html", variables, live=True)


def in_order(rows: Sequence[RunRow], order: str) -> list[RunRow]:
    """Return rows in an order of `render`, those without a value last."""
    key = ORDERS[order.removeprefix("-")]
    known = sorted((row for row in rows if key(row) is not None), key=key, reverse=order.startswith("-"))
    return known + [row for row in rows if key(row) is None]


def _row(name: str, path: Path, folders: Sequence[Path]) -> RunRow:
    """Return the row of a run folder by its job folders."""
    has_page = any((folder / JOB_FILE).is_file() for folder in folders)
    notes = [] if has_page else [f"no <job>/{JOB_FILE} yet, which `rlhf run` writes before a job's first step"]
    if not folders:
        return RunRow(name, path, notes[0])
    begun = {each: readable_status(each) for each in sorted(folders, key=lambda each: version_of(each / STATUS))}
    notes[:0] = [f"{each.name}/{STATUS} cannot be read" for each, status in begun.items() if not status]
    unfinished = (each for each, status in begun.items() if not status or status.phase != "Succeeded")
    folder = next(unfinished, [*begun][-1])
    status = begun[folder] or Status()
    return RunRow(
        name,
        path,
        "; ".join(notes),
        phase=shown_phase(path, begun[folder]),
        job=folder.name,
        progress=status.progress,
        measure=leading(status.metrics),
        started=min((each.start_time for each in begun.values() if each and each.start_time), default=""),
        has_page=has_page,
    )


def version_of(file: Path) -> tuple[int, int]:
    """Return (time of the last change in ns, bytes): another tuple means other content; zeros if it is missing."""
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
