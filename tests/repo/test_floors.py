"""A module imports only downwards (the contracts in pyproject.toml), and a breach does not go unnoticed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.each import each_case
from tests.repo.tree import ROOT

PACKAGES = {
    "rlhf_api": "crds",
    "rlhf_mapper": "operator",
    "rlhf_planning": "operator",
    "rlhf_importers": "trainer_image",
    "rlhf_kubectl": "operator",
    "rlhf_trainer": "trainer_image",
    "rlhf_examples": "examples",
}
BREACHES = {
    "the mapper imports a program": ("rlhf_mapper/planted.py", "import rlhf_trainer.errors", "the programs stand on"),
    "the planning imports a program": (
        "rlhf_planning/planted.py",
        "import rlhf_trainer.errors",
        "the programs stand on",
    ),
    "the planning imports torch": ("rlhf_planning/machines.py", "import torch", "the api, the mapper and the planning"),
    "an importer imports the trainer": ("rlhf_importers/trl.py", "import rlhf_trainer.errors", "the programs stand on"),
    "the api imports torch": ("rlhf_api/names.py", "import torch", "the api, the mapper and the planning are light"),
    "names of the api import its models": ("rlhf_api/names.py", "import rlhf_api.spec.job_spec", "floors of the api"),
    "costs import the search that asks for them": (
        "rlhf_mapper/strategy.py",
        "import rlhf_mapper.search.pruned",
        "floors of the mapper",
    ),
    "a worker imports the controller": (
        "rlhf_trainer/workers/base.py",
        "import rlhf_trainer.controller.batch",
        "floors of the trainer",
    ),
    "siblings know each other": (
        "rlhf_trainer/training/planted.py",
        "import rlhf_trainer.data.uri",
        "floors of the trainer",
    ),
    "a module without a floor": ("rlhf_trainer/planted.py", "", "floors of the trainer"),
    "math imports ray": ("rlhf_trainer/ops/masks.py", "import ray", "math knows no runtime"),
    "a reward imports torch": ("rlhf_trainer/rewards/sample.py", "import torch", "rewards know no runtime"),
    "the report imports torch": ("rlhf_trainer/report/plots.py", "import torch", "the report knows files only"),
    "training imports ray": ("rlhf_trainer/training/planted.py", "import ray", "training knows no runtime"),
    "an algorithm imports a worker": (
        "rlhf_trainer/algorithms/ppo.py",
        "import rlhf_trainer.workers.actor",
        "an algorithm names no runtime",
    ),
    "the plugin imports the client": (
        "rlhf_kubectl/kubectl.py",
        "import kubernetes",
        "kubectl's plugin needs the light part only",
    ),
    "an example imports the trainer": (
        "rlhf_examples/planted.py",
        "import rlhf_trainer.errors",
        "the examples stand alone",
    ),
}


def lint(folder: Path, packages: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run lint-imports by the contracts of a folder, over the packages under another, or the installed ones."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    first = f"import sys; sys.path.insert(0, {str(packages)!r}); " if packages else ""
    command = [sys.executable, "-c", first + program, "--no-cache"]
    environment = {**os.environ, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def copy(folder: Path) -> Path:
    """A copy of the packages, side by side, with the contracts."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package, place in PACKAGES.items():
        ignored = shutil.ignore_patterns("__pycache__", "*.json*")
        shutil.copytree(ROOT / place / package, folder / package, ignore=ignored)
    return folder


def test_the_floors_are_kept() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_copy_keeps_them_too(tmp_path: Path) -> None:
    """So that what fails below fails because of what is planted."""
    copy(tmp_path)
    result = lint(tmp_path, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What is said of a copy in which all breaches are planted."""
    folder = copy(tmp_path_factory.mktemp("breaches"))
    for file, line, _ in BREACHES.values():
        with (folder / file).open("a") as module:
            module.write(f"\n{line}\n")
    result = lint(folder, folder)
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout


@each_case(("file", "line", "contract"), BREACHES.values(), ids=BREACHES)
def test_a_breach_is_caught(complaints: str, file: str, line: str, contract: str) -> None:
    """The contract is broken, and its complaint names the planted import, or the module that has no floor."""
    kept, _, broken = complaints.partition("Broken contracts")
    assert any(text.startswith(contract) and text.endswith("BROKEN") for text in kept.splitlines()), complaints
    module = file.removesuffix(".py").replace("/", ".")
    imported = line.removeprefix("import ")
    (part,) = [part for part in re.split(r"\n(?=\S[^\n]*\n---)", broken) if part.startswith(contract)]
    assert f"{module} -> {imported}" in part if line else module.rpartition(".")[2] in part, part
