"""Answers of `rlhf size` for tests: asked by its command line, in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from rlhf_trainer.commands.cli import app

FITS, MISTAKE, UNFIT = 0, 2, 4
"""Exit codes."""


def ask(question: str, *codes: int) -> str:
    """The text that the command prints, on stderr too, after it has ended with one of these exit codes, or well."""
    told = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["size", *question.split()])
    assert told.exit_code in (codes or (FITS,)), told.output
    return " ".join(told.output.split())


def answer(question: str, *codes: int) -> dict[str, Any]:
    """The JSON that the command prints."""
    told = CliRunner().invoke(app, ["size", *question.split(), "--json"])
    assert told.exit_code in (codes or (FITS,)), told.output
    document: dict[str, Any] = json.loads(told.stdout)
    return document
