"""The wheel, alone in an environment: with its extra `operator`, as the Dockerfile installs it, and to train."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rlhf_api import kubectl_yaml
from tests.cluster import golden_path
from tests.repo.tree import ROOT, tracked_files

UV = ROOT / ".venv/bin/uv"
FILES = ("pyproject.toml", "README.md", "LICENSE")
TRAINERS = ("trainer_image/rlhf", "trainer_image/rlhf_trainer", "trainer_image/rlhf_importers")
SOURCES = (*FILES, "crds", "operator", *TRAINERS, "examples/rlhf_examples")
"""What the Dockerfiles copy."""
EXAMPLE = "examples/01-helpful-ppo.yaml"
TRAINER = {"torch", "ray", "vllm", "transformers", "datasets"}
FIND = "import importlib.util, json, sys; print(json.dumps([n for n in sys.argv[1:] if importlib.util.find_spec(n)]))"
OURS = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository, without this session's import path."""
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=ROOT, env=OURS, capture_output=True, text=True, check=False)


def must(*command: object) -> str:
    """What a command prints; it has to end well."""
    result = run(*command)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the repository and nothing old of it gets in."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, target)
    out = tmp_path_factory.mktemp("wheel")
    must(
        UV, "build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", out, source
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin of an environment with nothing but the wheel and its extra."""
    folder = tmp_path_factory.mktemp("operator") / "venv"
    must(UV, "venv", "--quiet", "--python", sys.executable, folder)
    constraints = ROOT / "requirements/cpu.lock"
    install = [UV, "pip", "install", "--quiet", "--python", folder / "bin/python", "--constraint", constraints]
    wanted = f"{wheel}[operator]"
    # `make install` has just filled uv's cache; the registry is asked only where somebody emptied it.
    if run(*install, "--offline", wanted).returncode:
        must(*install, wanted)
    return folder / "bin"


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    folders = [ROOT / name for name in ("crds", "operator", "trainer_image", "examples")]
    ours = [path.relative_to(folder) for path in tracked_files() for folder in folders if folder in path.parents]
    packages = {str(path) for path in ours if path.parts[0].startswith("rlhf_") and len(path.parts) > 1}
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    assert any(name.endswith(".jsonl") for name in packages)
    assert not sorted(packages - packed)


@pytest.mark.slow
def test_nothing_of_the_trainer_comes_along(programs: Path) -> None:
    found = json.loads(must(programs / "python", "-c", FIND, *sorted(TRAINER), "kopf", "rlhf_api", "rlhf_mapper"))
    assert found == ["kopf", "rlhf_api", "rlhf_mapper"]


@pytest.mark.slow
def test_the_operator_starts(programs: Path) -> None:
    assert "--config" in must(programs / "rlhf-operator", "--help")
    assert "fetch" in must(programs / "kubectl-rlhf", "--help")
    must(programs / "python", "-c", "import rlhf_operator.main")


@pytest.mark.slow
def test_a_wrong_settings_file_is_one_sentence(programs: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("readNode: true\n")
    result = run(programs / "rlhf-operator", "--config", file)
    assert result.returncode == 2
    assert "readNode" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_manifest_is_checked_and_planned(programs: Path) -> None:
    assert must(programs / "rlhf", "validate", EXAMPLE).strip() == "ok"
    cluster = ("--nodes", 2, "--gpus-per-node", 8, "--gpu", "a100-80g")
    assert "ppo" in must(programs / "rlhf", "plan", EXAMPLE, *cluster)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_trains_with_the_wheel_and_its_extras(wheel: Path, tmp_path: Path) -> None:
    """`rlhf-operator[trainer,cpu,s3,gs]` in the versions of the lock; nothing of the repository is on its path."""
    folder, python = tmp_path / "venv", tmp_path / "venv/bin/python"
    must(UV, "venv", "--quiet", "--python", sys.executable, folder)
    locks = ROOT / "requirements"
    versions = ("--constraint", locks / "trainer-cpu.lock", "--override", locks / "overrides.txt")
    must(UV, "pip", "install", "--quiet", "--python", python, *versions, f"{wheel}[trainer,cpu,s3,gs]")
    job = tmp_path / "job.yaml"
    sft = golden_path.shortened({golden_path.SFT: 2}, every_steps=2)[golden_path.SFT]
    job.write_text(kubectl_yaml.write(sft))
    must(folder / "bin/rlhf", "run", job, "--output", tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary[golden_path.SFT]["steps"] == 2
    must(python, "-c", "import gcsfs, s3fs, rlhf_trainer; assert 'site-packages' in rlhf_trainer.__file__")
