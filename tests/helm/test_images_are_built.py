"""How images are built: once for a content, with what this machine has, and without CUDA where there is none."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from images import build as images
from tests.repo.tree import ROOT

SCRIPT = ROOT / "images/without_cuda.py"
OPERATOR = images.IMAGES["operator"]
COPIED = ("requirements/operator.lock", "requirements/image-tools.lock", "pyproject.toml", "README.md", "LICENSE")
USER = "int gone(void); int kept(void); int used(void) { return gone() + kept(); } int here(void) { return 7; }"
"""A library as torch's are: of the functions that it calls, one is in a library that is gone."""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in which OPERATOR is made of small files."""
    for name in (*COPIED, "operator/module.py", "operator/__pycache__/module.pyc", "docs/page.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "Dockerfile").write_text((ROOT / "Dockerfile").read_text())
    monkeypatch.setattr(images, "ROOT", tmp_path)
    monkeypatch.delenv("BASE", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["operator/module.py", "requirements/operator.lock", "Dockerfile"])
def test_another_content_is_another_image(tree: Path, name: str) -> None:
    before = OPERATOR.reference
    (tree / name).write_text((tree / name).read_text() + "\n# changed")
    assert OPERATOR.reference != before


@pytest.mark.parametrize("name", ["docs/page.md", "operator/__pycache__/module.pyc"])
def test_what_is_not_copied_does_not_count(tree: Path, name: str) -> None:
    before = OPERATOR.reference
    (tree / name).write_text("changed")
    assert OPERATOR.reference == before


@pytest.mark.usefixtures("tree")
def test_so_is_another_base(monkeypatch: pytest.MonkeyPatch) -> None:
    before = OPERATOR.reference
    monkeypatch.setenv("BASE", "mirror.example.com/python:3.12")
    assert OPERATOR.reference != before


def test_what_is_lacking_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-B", "-m", "images.build", "operator"]
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    said = "error: no Docker engine answers, and without it images need the packages buildah, mmdebstrap\n"
    assert (ended.returncode, ended.stderr) == (1, said)


def test_an_image_that_does_not_exist_is_refused() -> None:
    command = [sys.executable, "-B", "-m", "images.build", "operators"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "no such image: operators; there are operator, trainer" in ended.stderr


def compile_library(path: Path, source: str, *options: object) -> None:
    """A shared library."""
    words = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", path, *options]
    subprocess.run([str(word) for word in words], input=source, text=True, check=True)


def test_a_library_loads_without_those_that_are_gone(tmp_path: Path) -> None:
    lib = tmp_path / "torch/lib"
    lib.mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    versions = tmp_path / "versions"
    versions.write_text("libgone.so.13 { gone; };")
    gone = lib / "libgone.so.13"
    compile_library(
        gone, "int gone(void) { return 1; }", "-Wl,-soname,libgone.so.13", f"-Wl,--version-script,{versions}"
    )
    compile_library(lib / "libkept.so", "int kept(void) { return 2; }", "-Wl,-soname,libkept.so")
    compile_library(lib / "libtorch.so", USER, "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", gone, lib / "libkept.so")
    gone.unlink()
    with pytest.raises(OSError, match="libgone"):
        ctypes.CDLL(str(lib / "libtorch.so"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=True).stdout
    assert "1 functions of libgone.so.13 are empty" in said
    loaded = ctypes.CDLL(str(lib / "libtorch.so"))
    assert loaded.here() == 7
    assert gone.stat().st_size < 50_000
