"""`python -m tests.gpu.bare`: rehearse the ladder from the carried parts, on the packages of the lent machine alone.

It makes an environment of Python 3.12 with the packages of device.txt, unpacks .gpu/ into it (`tests.gpu.carry` comes
first), and runs what is run on that machine, on the CPU: the first steps after the first part, then all steps. vLLM's
carried libraries need a GPU, so the steps with an engine only show here that vLLM accepts the engine's arguments.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu.carry import COUNT, PARTS
from tests.gpu.ladder import Ladder
from tests.gpu.unpack import unpack
from tests.repo.tree import ROOT

PYTHON = "3.12"
TORCH = "torch==2.11.0"
FIRST_STEPS = ("A", "B", "C")
SOURCES = ("crds", "operator", "trainer_image", "examples", ".")


def python_of_the_machine() -> str | None:
    """Return the path of a Python 3.12 of this machine; None if there is none."""
    known = [*Path.home().glob(f".pyenv/versions/{PYTHON}.*/bin/python{PYTHON}"), f"python{PYTHON}"]
    for path in map(str, known):
        try:
            subprocess.run([path, "-c", ""], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return path
    return None


def make_environment(folder: Path) -> Path:
    """Make an environment with the packages of the lent machine; returns its Python."""
    base = python_of_the_machine()
    if base is None:
        raise OSError(f"there is no Python {PYTHON}")
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--python", str(python)]
    subprocess.run([*install, TORCH], check=True)  # with the libraries of CUDA, without which it is not imported
    subprocess.run([*install, "--no-deps", "-r", str(Path(__file__).with_name("device.txt"))], check=True)
    return python


def rehearse(folder: Path) -> Ladder:
    """Rehearse the ladder in a new environment in `folder`; returns it with its results."""
    python, site, output = make_environment(folder / "environment"), folder / "site", folder / "results"
    path = ":".join([str(site), *(str(ROOT / source) for source in SOURCES)])
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"} | {"PYTHONPATH": path}
    command = [str(python), "-m", "tests.gpu", "--rehearse", "--output", str(output)]
    for number in range(1, COUNT + 1):
        unpack(PARTS / str(number), site, output)
        steps = {1: FIRST_STEPS, COUNT: ()}.get(number)
        if steps is not None:
            subprocess.run([*command, *steps], cwd=ROOT, env=environment, check=False)
    return Ladder(output, rehearse=True)


def main() -> int:
    """Rehearse; the exit code is 1 if a step fails."""
    argparse.ArgumentParser(prog="python -m tests.gpu.bare", description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = rehearse(Path(folder)).lines()
    return int(not (lines and all(line["ok"] for line in lines.values())))


if __name__ == "__main__":
    sys.exit(main())
