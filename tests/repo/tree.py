"""Which files the rules of this folder are about."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("crds", "operator", "trainer_image", "examples", "benchmarks")
NOT_OURS = {".git", ".venv", "__pycache__", "build", "dist", "runs"}


def product_files() -> list[Path]:
    """Every Python file of the product."""
    return sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py") if not NOT_OURS & set(path.parts))


def tracked_files() -> list[Path]:
    """Every file that is or would be committed; without git, every file that is not made by a tool."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return sorted(_walk(ROOT))
    return sorted(path for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in NOT_OURS or path.name.endswith(("_cache", ".egg-info")):
            continue
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path
