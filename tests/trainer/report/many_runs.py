"""Seconds of the list of `rlhf ui` for many runs beside one: `python -m tests.trainer.report.many_runs`."""

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhf_trainer.report import runs
from tests.trainer.report.conftest import JOBS, finish, ppo_record, run_job

COUNT, TIMES = 2000, 3


def seconds(work: Callable[[Path], object], folder: Path) -> float:
    """The least of a few times."""
    found = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work(folder)
        found.append(time.perf_counter() - began)
    return min(found)


def main() -> None:
    """Print the seconds of the list and of the page."""
    with TemporaryDirectory() as made:
        first = Path(made) / "runs" / "seed-0000"
        for job in JOBS:
            finish(first, run_job(first, job, map(ppo_record, range(1, 26))), reward_before=0.5, reward_after=1.5)
        for number in range(1, COUNT):
            shutil.copytree(first, first.with_name(f"seed-{number:04d}"))

        all_of_them, one = seconds(runs.list_runs, first.parent), seconds(runs.list_runs, first)
        ratio = f"{all_of_them / one:,.0f} times one run"
        sys.stdout.write(f"list: {all_of_them:.3f} s for {COUNT:,} runs, {ratio} ({1000 * one:.2f} ms)\n")
        rows = runs.list_runs(first.parent)
        page = seconds(lambda folder: runs.render(rows, folder, "", "-started", []), first.parent)
        sys.stdout.write(f"page: {page:.3f} s\n")


if __name__ == "__main__":
    main()
