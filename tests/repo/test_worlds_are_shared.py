"""`make test` runs tests that share a world in one process."""

import os
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from tests.conftest import WORLDS, group_of
from tests.repo.tree import ROOT

FILES = {
    f"tests/trainer/{folder}/test_{name}.py": f"import os\ndef test_{name}(): print('{folder}', os.getpid())\n"
    for folder, names in {"chain": "abcd", "ops": "efgh"}.items()
    for name in names
}


def test_every_world_is_there() -> None:
    assert all((ROOT / place).is_dir() for places in WORLDS.values() for place in places)


def test_a_file_without_a_world_is_a_group_of_its_own() -> None:
    assert group_of(PurePosixPath("tests/trainer/chain/test_a.py")) == "Ray"
    assert group_of(PurePosixPath("tests/api/test_a.py")) == "tests/api/test_a.py"


def test_files_of_a_world_run_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests" / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    options = ["-p", "xdist", "-n", "2", "--no-loadscope-reorder", "-rP", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options]
    no_other_plugin = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=no_other_plugin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    processes = {line for line in done.stdout.splitlines() if line.startswith("chain ")}
    assert len(processes) == 1, done.stdout
    assert done.stdout.count("\nchain ") == 4
