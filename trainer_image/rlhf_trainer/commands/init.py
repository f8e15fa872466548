"""`rlhf init`: a small project with an algorithm and a reward of its own, a test, and a job."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlhf_api.problems import Problem, SpecError
from rlhf_trainer.run_folder.folder import writing

PROJECT = Path(__file__).with_name("project")


def write_project(folder: Path) -> list[Path]:
    """Copy the files of the example project into a new folder; returns their paths. SpecError if the folder exists."""
    if folder.exists():
        raise SpecError([Problem(str(folder), "is there already; name a new folder")])
    with writing(folder):
        folder.mkdir(parents=True)
        return [Path(shutil.copyfile(file, folder / file.name)) for file in sorted(PROJECT.glob("*.*"))]
