"""`python -m images.resolve`: what the install of the image for GPUs would fetch, asked of the registry by uv.

Nothing is downloaded but metadata. It fails if the lock's packages contradict each other, or if one has no wheel for
the Dockerfile's base. It prints how many wheels there are, their size and the largest ones.
"""

import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from images.build import ROOT, CannotBuildError, must

LOCK = ROOT / "requirements/gpu.lock"
UV = Path(sys.prefix) / "bin/uv"
BASE = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_39", "--only-binary", ":all:")
"""The base of the Dockerfile, Ubuntu 24.04, as uv names it."""
LARGEST = 8


@dataclass(frozen=True)
class Wheel:
    """The wheel of a package that the image would get."""

    name: str
    bytes: int


def resolved(lock: Path = LOCK) -> list[Wheel]:
    """The wheels of a lock for the base, the largest first. CannotBuildError if they cannot be installed together."""
    with tempfile.TemporaryDirectory() as folder:
        target, answer = Path(folder, "target"), Path(folder, "pylock.toml")
        must([str(UV), "pip", "install", "--dry-run", "--target", str(target), *BASE, "--requirement", str(lock)])
        output = ("--format", "pylock.toml", "--output-file", str(answer))
        must([str(UV), "pip", "compile", "--quiet", "--no-deps", *BASE, *output, str(lock)])
        packages = tomllib.loads(answer.read_text())["packages"]
    wheels = [Wheel(each["name"], min(wheel["size"] for wheel in each["wheels"])) for each in packages]
    return sorted(wheels, key=lambda wheel: -wheel.bytes)


def main() -> int:
    """Print what would be fetched; exits 1 if it could not be."""
    try:
        wheels = resolved()
    except (CannotBuildError, subprocess.SubprocessError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(wheels)} wheels, {sum(wheel.bytes for wheel in wheels) / 1e9:.2f} GB to download")
    for wheel in wheels[:LARGEST]:
        print(f"{wheel.bytes / 1e9:5.2f} GB  {wheel.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
