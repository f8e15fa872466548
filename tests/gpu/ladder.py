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
class Step:
    """A program of the ladder."""

    module: str
    seconds: int
    """The most that it may take."""
    variant: str = ""


RUNGS: Mapping[str, Step] = {
    "trainer": Step("trainer", 240),
    "generation": Step("generation", 180),
    "generation-float32": Step("generation", 180, "FP32"),
    "update": Step("update", 300),
    "speed": Step("speed", 240),
    "speed-eager": Step("speed", 180, "eager"),
    "seven": Step("seven", 400),
    "demo": Step("demo", 580),
    "several": Step("several", 400),
}


def climb(name: str, *, rehearse: bool) -> dict[str, Any]:
    """What a rung printed; where it was killed or died, what is known of that."""
    step = RUNGS[name]
    options = ["--seconds", str(step.seconds), *filter(None, [step.variant]), *(["--rehearse"] if rehearse else [])]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", f"tests.gpu.{step.module}", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=step.seconds + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
    line = out.splitlines()[-1] if out else ""
    try:
        found: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        reason = f"ended with exit code {process.returncode} and without a line of JSON: {line[:300]}"
        return {"rung": name, "rehearsal": rehearse, "ok": False, "failed": {"process": reason}}
    return found
