"""`rlhf logs`: events, failures and stacks of the jobs of a run folder, in order of time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlhf_api.problems import Problem, SpecError, suggestion
from rlhf_trainer.run_folder.commands import job_folders
from rlhf_trainer.run_folder.folder import rfc3339
from rlhf_trainer.run_folder.top import read_status

POLL_SECONDS = 0.5
EVENTS, STACKS = "events.log", "stacks.txt"
Line = tuple[str, Text]
"""Line of the printed log: its time (RFC 3339) and its text."""


def show_logs(output: Path, *, job: str | None, follow: bool) -> None:
    """Print the events of a run's jobs by time, and after a hang the stacks of its ranks.

    follow: go on with new lines until Ctrl-C. SpecError if `output` is no run folder or has no such job.
    """
    console, shown = Console(highlight=False, soft_wrap=True), dict[Path, int]()
    with suppress(KeyboardInterrupt):
        while True:
            new: list[Line] = []
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


def _lines_of(folder: Path) -> Iterator[Line]:
    """Yield the events of a job as lines, and last the stacks of all ranks in the job's latest hang."""
    status = read_status(folder)
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
    """Return the whole lines of a file, without a last line that is still being written."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text[: text.rfind("\n") + 1]
