"""The image for GPUs: every step of its Dockerfile but the wheels of GPUs is built; those are asked of the registry."""

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from images import build as images
from images.resolve import LOCK, resolved
from tests.cluster.capabilities import required
from tests.helm.test_the_images_fit_together import locked, tracked_names
from tests.repo.tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

DOCKERFILE = ROOT / "trainer_image/Dockerfile"
LEFT_OUT = {*(locked("gpu").keys() - locked("trainer-cpu").keys()), "torch"}
"""Packages of the lock that only run on GPUs, and torch, which is as large: nearly all of the download."""


def test_the_lock_can_be_installed_on_its_base() -> None:
    wheels = {wheel.name: wheel for wheel in resolved()}
    assert {name: wheel.version for name, wheel in wheels.items()} == locked("gpu")
    large = {name for name, wheel in wheels.items() if wheel.bytes > 100e6}
    assert {"torch", "vllm", "nvidia-nccl-cu13"} <= large <= LEFT_OUT
    assert "NVIDIA" in wheels["nvidia-nccl-cu13"].licence()
    assert wheels["vllm"].licence() == "Apache-2.0"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of an image that was built by the Dockerfile as it is, from a lock without LEFT_OUT."""
    reason = "it is built by buildah" if images.docker_answers() else images.cannot_build()
    if reason and required():
        pytest.fail(reason, pytrace=False)
    if reason:
        pytest.skip(reason)
    tree = tmp_path_factory.mktemp("context")
    for name in [*tracked_names(DOCKERFILE), ".dockerignore", str(DOCKERFILE.relative_to(ROOT))]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, tree / name)
    kept = [f"{name}=={version}\n" for name, version in locked("gpu").items() if name not in LEFT_OUT]
    (tree / LOCK.relative_to(ROOT)).write_text("".join(kept))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "ROOT", tree)
        reference = images.build(images.Image("rlhf-trainer-gpu", str(DOCKERFILE.relative_to(ROOT)), {"LOCK": "gpu"}))
    container = images.must(images.buildah("from", reference)).strip()
    try:
        yield Path(images.must(images.buildah("mount", container)).strip())
    finally:
        images.must(images.buildah("rm", container))


def test_all_else_is_built_and_listed(root: Path) -> None:
    lists = root / "usr/share/rlhf"
    listed = {each["name"]: each for each in json.loads((lists / "sbom.cdx.json").read_text())["components"]}
    with (lists / "licences.csv").open() as file:
        licences = {row["Name"]: row["License"] for row in csv.DictReader(file)}
    normal = {name.lower().replace("_", "-").replace(".", "-") for name in licences}
    installed = locked("gpu").keys() - LEFT_OUT
    assert len(installed) > 150
    assert installed <= {name.lower().replace("_", "-").replace(".", "-") for name in listed}
    assert installed - {"setuptools"} <= normal, "pip-licenses leaves out what builds packages"
    assert all(licences.values())


def test_its_libraries_for_rdma_and_compilers_are_there(root: Path) -> None:
    found = {path.name for path in (root / "usr/lib").rglob("lib*.so*")}
    assert {"libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1"} <= found
    assert all((root / "usr/bin" / program).exists() for program in ("bash", "gcc", "g++", "wget"))
