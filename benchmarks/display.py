"""Cost of the outputs of a run, as a share of its steps: python benchmarks/display.py [--json PATH] [--steps N].

The demo's chain runs once with everything on (a terminal, TensorBoard files, a metrics port, a timeline); its steps are
the shortest there are. In that one run the time of each output is measured beside that of the steps. The terminal is
drawn in a thread while the steps go on: of that the CPU time counts.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from rlhf_api.job import Job
from rlhf_api.status import Phase
from rlhf_trainer.outputs.event_files import EventFiles
from rlhf_trainer.outputs.listeners import Listener, OutputOptions
from rlhf_trainer.outputs.live import LiveDisplay
from rlhf_trainer.outputs.metrics import PrometheusMetrics
from rlhf_trainer.outputs.opening import open_listeners
from rlhf_trainer.outputs.trace import Trace
from rlhf_trainer.run import chain
from rlhf_trainer.run_folder.folder import JobFolder
from rlhf_trainer.telemetry import StepReport

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "examples" / "01-helpful-ppo.yaml"
PORT = 9400
OUTPUTS = ("run folder", "terminal", "drawing", "TensorBoard", "Prometheus", "timeline")
Costs = dict[str, dict[str, float]]


class Stopwatch:
    """Seconds of each output, by job; only the time from a job's first step to its last counts."""

    def __init__(self) -> None:
        self.seconds: Costs = {}
        self._job: str | None = None

    def begin(self, job: str) -> None:
        """The first step of a job starts."""
        self._job = job
        self.seconds[job] = dict.fromkeys(OUTPUTS, 0.0)

    def end(self) -> None:
        """The last step of the job is done."""
        self._job = None

    def time(self, owner: type, method: str, output: str, clock: Callable[[], float] = time.perf_counter) -> None:
        """Count the calls of a method for an output."""
        original: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(original)
        def timed(*arguments: Any, **named: Any) -> Any:
            job, began = self._job, clock()
            try:
                return original(*arguments, **named)
            finally:
                if job:
                    self.seconds[job][output] += clock() - began

        setattr(owner, method, timed)


def run_measured(folder: Path, steps: int) -> None:
    """Run the chain in this process with every output timed; writes costs.json: job -> output -> seconds."""
    watch = Stopwatch()

    class Bounds:
        """A listener that tells the watch when steps begin and end."""

        def begin(self, job: Job, *, first_step: int, total_steps: int) -> None:  # noqa: ARG002
            watch.begin(job.name)

        def step(self, report: StepReport) -> None:
            if report.record["step"] == steps:
                watch.end()

        def end(self, phase: Phase) -> None:
            """Told before."""

    @contextmanager
    def opened_and_watched(
        options: OutputOptions, output: Path, warn: Callable[[str], None]
    ) -> Iterator[Sequence[Listener]]:
        with open_listeners(options, output, warn) as listeners:
            yield [*listeners, Bounds()]

    watch.time(JobFolder, "record", "run folder")
    watch.time(LiveDisplay, "step", "terminal")
    watch.time(Live, "refresh", "drawing", time.thread_time)
    watch.time(EventFiles, "step", "TensorBoard")
    watch.time(PrometheusMetrics, "step", "Prometheus")
    watch.time(Trace, "step", "timeline")
    chain.opened = opened_and_watched  # type: ignore[attr-defined]
    options = OutputOptions(tensorboard=True, trace=True, metrics_port=PORT)
    sets = [f"training.totalSteps={steps}", "evaluation.data.limit=16"]
    chain.run_file(MANIFEST, output=folder, overrides=sets, restart=True, address=None, options=options)
    (folder / "costs.json").write_text(json.dumps(watch.seconds))


def measure(steps: int) -> Costs:
    """job -> `step` (seconds of all steps) and each output's seconds, from a run in a terminal."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        ours, theirs = pty.openpty()
        reader = threading.Thread(target=drain, args=(ours,), daemon=True)
        reader.start()
        command = [sys.executable, __file__, "--inside", str(folder), "--steps", str(steps)]
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        subprocess.run(command, check=True, stdout=theirs, env=environment)
        os.close(theirs)
        costs: Costs = json.loads((folder / "costs.json").read_text())
        for job, outputs in costs.items():
            lines = (folder / job / "metrics.jsonl").read_text().splitlines()
            outputs["step"] = sum(json.loads(line)["time/step"] for line in lines)
    return costs


def drain(descriptor: int) -> None:
    """Read what a terminal would show, until nobody writes any more."""
    with suppress(OSError):  # how Linux tells that the other end is closed
        while os.read(descriptor, 65536):
            pass


def show(costs: Costs, steps: int) -> None:
    """The table of shares of a step."""
    table = Table(title="Time of the outputs, share of a step")
    for column in ("job", "step", *OUTPUTS, "all"):
        table.add_column(column, justify="left" if column == "job" else "right")
    for job, outputs in costs.items():
        shares = [outputs.get(output, 0.0) / outputs["step"] for output in OUTPUTS]
        table.add_row(job, f"{outputs['step'] / steps:.3f} s", *(f"{share:.2%}" for share in (*shares, sum(shares))))
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        run_measured(options.inside, options.steps)
        return
    costs = measure(options.steps)
    show(costs, options.steps)
    if options.json:
        options.json.write_text(json.dumps(costs, indent=2) + "\n")


if __name__ == "__main__":
    main()
