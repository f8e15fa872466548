"""A program that plays kubectl, put before all others on PATH."""

import stat
from pathlib import Path

import pytest


def install_kubectl(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the program into `folder`/bin, where this process finds it; text: the whole program."""
    program = folder / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
