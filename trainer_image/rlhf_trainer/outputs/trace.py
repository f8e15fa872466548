"""Timeline of a job's steps in Chrome's trace format: a process a pool, a thread a rank, and the controller."""

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_api.job import Job
from rlhf_api.status import Phase
from rlhf_trainer.run_folder.attempt import replace
from rlhf_trainer.telemetry import CONTROLLER, EPISODE, EPISODE_PHASES, Span, StepReport

FIRST_STEPS, LATEST_STEPS = 5, 20
"""Numbers of steps in trace.json: the first ones of the attempt, and with `--trace` also the latest ones."""
MAX_OF_EPISODES = 5000
"""Most spans of episodes of a step in trace.json; the event of the step tells how many are left out."""


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
        text = ",\n".join(json.dumps(event) for event in self._events(report, self._origin))
        (self._first if len(self._first) < FIRST_STEPS else self._latest).append(text)
        events = ",\n".join([*self._names.values(), *self._first, *self._latest])
        replace(self._path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n')

    def end(self, phase: Phase) -> None:
        """Do nothing: every step is already in the file."""

    def _events(self, report: StepReport, origin: float) -> Iterator[dict[str, Any]]:
        """Yield the trace events of a step; times in microseconds from `origin`, the start of the first step.

        Episodes overlap on their rank, so each is an asynchronous event; its requests and tools share its id.
        """
        step: dict[str, Any] = {"step": int(report.record["step"])}
        inner = [span for span in report.spans if span.phase in EPISODE_PHASES]
        inner.sort(key=lambda span: (span.start, -span.end))
        left_out = {"left_out": len(inner) - MAX_OF_EPISODES} if len(inner) > MAX_OF_EPISODES else {}
        for place, span in enumerate(report.spans):
            if span.phase not in EPISODE_PHASES:
                duration, args = _microseconds(span.end - span.start), step if place else step | left_out
                yield {**self._event("X", span, span.start - origin), "cat": span.phase, "dur": duration, "args": args}
        episodes = dict[int, int]()
        for span in inner[:MAX_OF_EPISODES]:
            episodes[span.id] = episodes.get(span.parent, span.id)
            args = step | {"phase": span.phase}
            yield {**self._event("b", span, span.start - origin), "id": f"{episodes[span.id]:x}", "args": args}
        for span in reversed(inner[:MAX_OF_EPISODES]):
            yield {**self._event("e", span, span.end - origin), "id": f"{episodes[span.id]:x}"}

    def _event(self, kind: str, span: Span, seconds: float) -> dict[str, Any]:
        """Return the fields that all events of a span have; seconds: time of the event since the first step's start."""
        name = CONTROLLER if span.phase == CONTROLLER else f"pool {span.pool}"
        process = self._processes.setdefault(name, len(self._processes))
        if (process, span.rank) not in self._names:
            names = {
                "process_name": {"name": name},
                "process_sort_index": {"sort_index": process},
                "thread_name": {"name": "algorithm" if name == CONTROLLER else f"rank {span.rank}"},
            }
            shared = {"pid": process, "tid": span.rank}
            texts = (json.dumps({"ph": "M", "name": key, **shared, "args": each}) for key, each in names.items())
            self._names[process, span.rank] = ",\n".join(texts)
        placed = {"pid": process, "tid": span.rank, "ts": _microseconds(seconds)}
        return {"ph": kind, "name": span.name, "cat": EPISODE, **placed}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)
