"""Names that a user types become parts of paths of the API server, and never lead to other ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_api.exit_codes import ExitCode
from rlhf_kubectl.cli import app

KUBECTL = """#!/bin/sh
echo "$@" >> {asked}
case "$*" in *rlhfjobs\\ --request*) echo '{{"items": []}}';; *) echo '{{"metadata": {{"name": "other"}}}}';; esac
"""
NAMES = ["", ".", "..", "a/status", "../x", "a?b=c", "a b", "a\n", "\udcff"]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What kubectl was asked for, a line a call; it has no jobs, but any other path gives something."""
    (tmp_path / "kubectl").write_text(KUBECTL.format(asked=tmp_path / "asked"))
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path / "asked"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_name_of_a_job_is_none(name: str, asked: Path) -> None:
    done = CliRunner().invoke(app, ["why", "--namespace=mine", "--", name])
    assert done.exit_code == ExitCode.SPEC
    assert "there is no RLHFJob" in done.stderr
    assert [line.split("/")[-1] for line in asked.read_text().splitlines()] == ["rlhfjobs --request-timeout=10s"]


@pytest.mark.parametrize("name", NAMES[1:])
def test_what_is_no_name_of_a_namespace_is_told(name: str, asked: Path) -> None:
    done = CliRunner().invoke(app, ["top", "--once", f"--namespace={name}"])
    assert done.exit_code == ExitCode.SPEC
    assert done.stderr.startswith("error: --namespace: ")
    assert not asked.exists()
