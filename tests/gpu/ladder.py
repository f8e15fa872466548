"""The rungs in their order, and how one is run: in a process of its own, for a bounded time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.repo.tree import ROOT

GRACE_SECONDS = 20
"""For a rung whose time is up to say what it has found."""


@dataclass(frozen=True)
class Program:
    """A program of the ladder."""

    module: str
    seconds: int
    """The most that it may take."""
    variant: str = ""


RUNGS: Mapping[str, Program] = {
    "trainer": Program("trainer", 240),
    "generation": Program("generation", 180),
    "generation-float32": Program("generation", 180, "FP32"),
    "update": Program("update", 300),
    "speed": Program("speed", 240),
    "speed-eager": Program("speed", 180, "eager"),
    "seven": Program("seven", 400),
    "demo": Program("demo", 580),
    "several": Program("several", 400),
}


def _last_words(process: subprocess.Popen[str]) -> str:
    """What a killed rung printed; nothing where a process that it left behind holds the pipe open."""
    try:
        return process.communicate(timeout=GRACE_SECONDS)[0]
    except subprocess.TimeoutExpired:
        return ""


def climb(name: str, *, rehearse: bool) -> dict[str, Any]:
    """What a rung printed; where it was killed or died, what is known of that."""
    program = RUNGS[name]
    options = [
        "--seconds",
        str(program.seconds),
        *filter(None, [program.variant]),
        *(["--rehearse"] if rehearse else []),
    ]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", f"tests.gpu.{program.module}", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=program.seconds + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out = _last_words(process)
    line = out.splitlines()[-1] if out else ""
    try:
        found: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        reason = f"ended with exit code {process.returncode} and without a line of JSON: {line[:300]}"
        return {"rung": name, "rehearsal": rehearse, "ok": False, "failed": {"process": reason}}
    return found
