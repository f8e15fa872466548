"""The steps in their order: each is a process with a time box, and its result is written as soon as it is known."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.summary import summary_of
from tests.repo.tree import ROOT

GRACE_SECONDS = 20
"""Time for imports before a step's own seconds begin, and for its last line after them."""
LEAST_SECONDS = 40
"""Least time box with which a step is begun."""
REHEARSAL_FACTOR = 10
"""How much longer a step may take on the CPU."""
LOG_BYTES = 200_000
"""Last bytes of each step's log that go into the one file of logs."""
PACKAGE = "tests.gpu."
"""Beginning of the names of the steps' modules."""
GPU_FILES = "nvidia[0-9]*"
"""Device files of GPUs in /dev."""


@dataclass(frozen=True)
class Step:
    """A step of the ladder."""

    module: str
    seconds: int
    """Time box."""
    variant: str = ""
    has_engine: bool = False
    """Whether it starts vLLM, which may run without CUDA graphs."""
    is_eager: bool = False
    """Whether vLLM runs without CUDA graphs from the beginning."""
    gpus: int = 1

    @property
    def name(self) -> str:
        return " ".join(filter(None, [self.module, self.variant, "eager" if self.is_eager else ""]))


STEPS: Mapping[str, Step] = {
    "A": Step("facts", 60),
    "B": Step("update", 110, "1.5b"),
    "C": Step("update", 110, "7b"),
    "D": Step("generation", 130, has_engine=True),
    "E": Step("several", 300, has_engine=True, gpus=2),
    "F": Step("demo", 280),
    "G": Step("generation", 130, "invariant", has_engine=True),
    "H": Step("speed", 110, has_engine=True, is_eager=True),
    "I": Step("seven", 220, has_engine=True),
    "J": Step("speed", 190, has_engine=True),
    "K": Step("learn", 150),
    "L": Step("update", 200, "others"),
    "M": Step("generation", 130, "FP32", has_engine=True),
    "N": Step("examples", 120),
}
"""Steps by letter. The first three need no vLLM, so they run before its files have come."""


@dataclass(frozen=True)
class Ladder:
    """A climb of the ladder, which goes on where an earlier one with the same folder ended."""

    output: Path
    rehearse: bool

    @property
    def _results(self) -> Path:
        return self.output / "results.jsonl"

    def lines(self) -> dict[str, dict[str, Any]]:
        """Return the last result of each step by its letter."""
        if not self._results.exists():
            return {}
        return {line["letter"]: line for line in map(json.loads, self._results.read_text().splitlines())}

    def climb(self, letters: Iterable[str], *, seconds: float, repeats_failed: bool = False) -> bool:
        """Run the steps that have no result yet; return True if all steps with a result hold.

        seconds: for all steps together. repeats_failed: also run steps that have failed.
        """
        ends = time.monotonic() + seconds
        self.output.mkdir(parents=True, exist_ok=True)
        for letter in letters:
            known = self.lines().get(letter)
            if known and (known["ok"] or not repeats_failed):
                print(f"{letter}: it has a result in {self._results}", flush=True)
                continue
            self._take(letter, ends)
        print(self.publish(), flush=True)
        return all(line["ok"] for line in self.lines().values())

    def _take(self, letter: str, ends: float) -> None:
        """Run a step; where vLLM does not start with CUDA graphs, run it without them at once, as all later ones."""
        step = STEPS[letter]
        if not self.rehearse and step.gpus > len(list(Path("/dev").glob(GPU_FILES))):
            print(f"{letter}: {step.name} needs {step.gpus} GPUs", flush=True)
            return
        plain = [line for name, line in self.lines().items() if not STEPS[name].variant]  # a mode may fail for itself
        has_fallen = any(line.get("fell_back") and set(line["figures"]) - {"start"} for line in plain)
        is_eager = step.is_eager or (step.has_engine and has_fallen)
        line = self._run(letter, ends, is_eager=is_eager)
        if line and step.has_engine and not is_eager and not (line["ok"] or set(line["figures"]) - {"start"}):
            reason = "; ".join(line["failed"].values())
            line = {**(self._run(letter, ends, is_eager=True) or line), "fell_back": reason}
        if line:
            with self._results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line)[:1500], flush=True)
            self.publish()

    def _run(self, letter: str, ends: float, *, is_eager: bool) -> dict[str, Any]:
        """Return a step's result; empty if too little time is left."""
        step = STEPS[letter]
        box = min(step.seconds * (REHEARSAL_FACTOR if self.rehearse else 1), ends - time.monotonic())
        if box < LEAST_SECONDS:
            print(f"{letter}: no time for {step.name}", flush=True)
            return {}
        name = f"{letter}-{step.name}".replace(" ", "-") + ("-eager" if is_eager and not step.is_eager else "")
        parts, log = self.output / f"{name}.jsonl", self.output / f"{name}.log"
        command = [sys.executable, "-W", "ignore", "-m", f"{PACKAGE}{step.module}", *filter(None, [step.variant])]
        command += ["--seconds", str(int(box - GRACE_SECONDS))]
        command += [*(["--rehearse"] if self.rehearse else []), *(["--eager"] if is_eager else [])]
        began = time.monotonic()
        with parts.open("w") as printed, log.open("w") as errors:
            process = subprocess.Popen(command, cwd=ROOT, stdout=printed, stderr=errors, start_new_session=True)
            try:
                process.wait(timeout=box + GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        with suppress(ProcessLookupError):  # processes that it left would hold memory of the GPU
            os.killpg(process.pid, signal.SIGKILL)
        line = result_of(parts.read_text(), process.returncode)
        return {"letter": letter, "step": step.name, "took": round(time.monotonic() - began, 1), **line}

    def publish(self) -> str:
        """Write the summary and one file of logs, copy them with the results to $OUT, and return the summary."""
        said = summary_of(self.lines(), {letter: step.name for letter, step in STEPS.items()}, self.output)
        (self.output / "summary.txt").write_text(said + "\n")
        logs = sorted(self.output.glob("*.log"))
        tails = [f"===== {log.name}\n{log.read_text(errors='replace')[-LOG_BYTES:]}" for log in logs]
        (self.output / "logs.txt").write_text("\n".join(tails))
        if (out := os.environ.get("OUT")) and Path(out) != self.output:
            for name in ("results.jsonl", "summary.txt", "logs.txt"):
                if (self.output / name).exists():
                    shutil.copy(self.output / name, out)
        return said


def result_of(printed: str, code: int) -> dict[str, Any]:
    """Return a step's last line; of a step that was killed or died, the parts that it had printed."""
    lines: list[dict[str, Any]] = []
    for text in printed.splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue  # a library printed it
        if isinstance(line, dict):
            lines.append(line)
    if lines and "ok" in lines[-1]:
        return lines[-1]
    parts = [line for line in lines if "part" in line]
    failed = {line["part"]: line["failed"] for line in parts if line["failed"]}
    failed["process"] = f"it ended with exit code {code} and without its last line"
    return {"ok": False, "failed": failed, "skipped": {}, "figures": {line["part"]: line["figures"] for line in parts}}
