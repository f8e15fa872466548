"""`make test` runs tests that share a world in one process, and no more than two worlds at once."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest

from tests.conftest import WORLDS, group_of
from tests.repo.tree import ROOT

TEST = """\
import os, time
from pathlib import Path
def test_{name}():
    (here := Path({running!r}, str(os.getpid()))).touch()
    time.sleep(0.2)
    print("{folder}", os.getpid(), len(os.listdir(here.parent)))
    here.unlink()
"""
"""A test that says which process runs it, and how many do now."""


def test_every_world_is_there() -> None:
    assert all((ROOT / place).exists() for places in WORLDS.values() for place in places)


def test_a_file_without_a_world_is_a_group_of_its_own() -> None:
    assert group_of(PurePosixPath("tests/trainer/chain/test_a.py")) == "Ray"
    assert group_of(PurePosixPath("tests/trainer/rewards/test_rollouts_are_kept.py")) == "ranks"
    assert group_of(PurePosixPath("tests/api/test_a.py")) == "tests/api/test_a.py"


def lines_of(folder: Path, files: Mapping[str, str], workers: int) -> list[list[str]]:
    """Run TEST of each file, whose folder is given, by some workers: (folder, process, processes that ran) of each."""
    pytest.importorskip("xdist")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (folder / "running").mkdir()
    for number, (file, world) in enumerate(files.items()):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        running = str(folder / "running") if world != "files" else str(folder)
        (folder / file).write_text(TEST.format(name=f"of_{number}", folder=world, running=running))
    (folder / "tests" / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    options = ["-p", "xdist", "-n", str(workers), "--no-loadscope-reorder", "-rP", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options]
    no_other_plugin = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=no_other_plugin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    found = [line.split() for line in done.stdout.splitlines() if line.split(" ")[0] in {*WORLDS, "files"}]
    assert len(found) == len(files), done.stdout
    return found


def test_a_world_has_one_process_and_two_worlds_run_at_once(tmp_path: Path) -> None:
    places = {world: places[0] for world, places in WORLDS.items() if " " not in world}
    files = {f"{place}/test_{name}.py": world for world, place in places.items() for name in "ab"}
    files |= {f"tests/trainer/ops/test_{name}.py": "files" for name in "ab"}
    found = [(world, process, int(running)) for world, process, running in lines_of(tmp_path, files, workers=3)]
    of_world = {world: {process for each, process, _ in found if each == world} for world in places}
    assert all(len(processes) == 1 for processes in of_world.values()), of_world
    assert len(set().union(*of_world.values())) == 2
    assert max(running for world, _, running in found if world != "files") <= 2
