"""Timeline of a job's steps in Chrome's trace format: a process a pool, a thread a rank, and the controller."""

import json
from collections import deque
from pathlib import Path
from typing import Any

from rlhf_api.job import Job
from rlhf_api.status import Phase
from rlhf_trainer.run_folder.attempt import replace
from rlhf_trainer.telemetry import CONTROLLER, Span, StepReport

FIRST_STEPS, LATEST_STEPS = 5, 20
"""Numbers of steps in trace.json: the first ones of the attempt, and with `--trace` also the latest ones."""


class Trace:
    """Listener that replaces `DIR/<job>/trace.json`, for ui.perfetto.dev or chrome://tracing, after each step in it."""

    def __init__(self, output: Path, *, latest: int) -> None:
        """Keep the run folder; `latest`: number of the latest steps in the file, besides the first ones."""
        self._output, self._most = output, latest

    def begin(self, job: Job, *, first_step: int, total_steps: int) -> None:  # noqa: ARG002 the steps say it
        self._path = self._output / job.name / "trace.json"
        self._origin: float | None = None
        self._first: list[str] = []
        self._latest: deque[str] = deque(maxlen=self._most)
        self._processes = {CONTROLLER: 0}
        self._names: dict[tuple[int, int], str] = {}

    def step(self, report: StepReport) -> None:
        if len(self._first) == FIRST_STEPS and not self._most:
            return
        if self._origin is None:
            self._origin = min(span.start for span in report.spans)
        number = int(report.record["step"])
        text = ",\n".join(json.dumps(self._event(span, number, self._origin)) for span in report.spans)
        (self._first if len(self._first) < FIRST_STEPS else self._latest).append(text)
        events = ",\n".join([*self._names.values(), *self._first, *self._latest])
        replace(self._path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n')

    def end(self, phase: Phase) -> None:
        """Do nothing: every step is already in the file."""

    def _event(self, span: Span, step: int, origin: float) -> dict[str, Any]:
        """Return the trace event of a rank's span of work; times in microseconds from the start of the first step."""
        name = CONTROLLER if span.phase == CONTROLLER else f"pool {span.pool}"
        process = self._processes.setdefault(name, len(self._processes))
        if (process, span.rank) not in self._names:
            names = {
                "process_name": {"name": name},
                "process_sort_index": {"sort_index": process},
                "thread_name": {"name": "algorithm" if name == CONTROLLER else f"rank {span.rank}"},
            }
            shared = {"pid": process, "tid": span.rank}
            texts = (json.dumps({"ph": "M", "name": kind, **shared, "args": each}) for kind, each in names.items())
            self._names[process, span.rank] = ",\n".join(texts)
        return {
            "ph": "X",
            "name": span.name,
            "cat": span.phase,
            "pid": process,
            "tid": span.rank,
            "ts": round(1e6 * (span.start - origin), 1),
            "dur": round(1e6 * (span.end - span.start), 1),
            "args": {"step": step},
        }
