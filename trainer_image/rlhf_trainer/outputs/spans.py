"""Traces of a job's steps for an OpenTelemetry collector: from the recorder's spans, by OTLP over HTTP.

Names follow the proposed conventions for reinforcement learning (`rl.*`, semantic-conventions #3580); names of our own
begin with `rlhf.`.
"""

import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, Final

from rlhf_api.job import Job
from rlhf_api.own_code import describe_error
from rlhf_api.problems import one_line
from rlhf_api.status import Phase
from rlhf_trainer.outputs.trackers import report_output
from rlhf_trainer.run_folder.attempt import own_attempt
from rlhf_trainer.run_folder.folder import MAX_REASON, JobFolder
from rlhf_trainer.telemetry import MODEL_CALL, TOOL, Span, StepReport

FIELD: Final = "spec.outputs.otel"
PATH: Final = "/v1/traces"
SPANS_AT_ONCE, MAX_WAITING = 500, 100_000
"""Spans in one request, and most spans that wait to be sent; a step whose spans would exceed this is left out."""
LAST_SECONDS = 15.0
"""Most seconds for which the end of a job waits for spans to be sent."""
NAMES: Final[Mapping[str, str]] = {"generation": "rl.sample", "update": "rl.train", "reshard": "rl.sync"}
"""Phase of a rank's span -> name in the proposed conventions."""
REWARDS: Final = ("reward.", "cost.")
"""Beginnings of the names of spans that score responses."""


class SpanSender:
    """Listener that sends each step as a trace, from a thread; only the job's end waits for it, at most LAST_SECONDS.

    Spans that cannot be sent are counted, reported at the end, and not sent again.
    """

    def __init__(self, job: Job, folder: JobFolder, warn: Callable[[str], None]) -> None:
        assert job.spec.outputs.otel is not None, "it is asked for"
        self._endpoint = job.spec.outputs.otel.endpoint.rstrip("/").removesuffix(PATH) + PATH
        self._job, self._folder, self._warn = job, folder, warn
        self._steps: queue.SimpleQueue[StepReport | None] = queue.SimpleQueue()
        self._given = self._tried = self._sent = self._left_out = 0
        """Numbers of spans: put into the queue, given to the exporter, sent, and left out of the queue."""

    def begin(self, job: Job, *, first_step: int, total_steps: int) -> None:  # noqa: ARG002 the steps say it
        self._thread = threading.Thread(target=self._work, name=FIELD, daemon=True)
        self._thread.start()

    def step(self, report: StepReport) -> None:
        count = len(report.spans)
        if self._given - self._tried + count > MAX_WAITING:
            self._left_out += count
        else:
            self._given += count
            self._steps.put(report)

    def end(self, phase: Phase) -> None:  # noqa: ARG002 a span has no phase of a job
        self._steps.put(None)
        self._thread.join(LAST_SECONDS)
        if dropped := self._left_out + self._given - self._sent:
            self._say(f"{dropped:,} of {self._left_out + self._given:,} spans were not sent by the end of the job")

    def _work(self) -> None:
        try:
            self._send_all(_exporter(self._endpoint))
        except Exception as error:  # noqa: BLE001 such as a wrong variable OTEL_EXPORTER_OTLP_*: training goes on
            self._say(f"{one_line(describe_error(error), MAX_REASON)}; training goes on without traces")

    def _send_all(self, exporter: Any) -> None:
        resource, has_failed = self._resource(), False
        while report := self._steps.get():
            spans = list(trace_of(report, resource))
            for first in range(0, len(spans), SPANS_AT_ONCE):
                some = spans[first : first + SPANS_AT_ONCE]
                is_sent = exporter.export(some).name == "SUCCESS"
                self._tried += len(some)
                self._sent += len(some) * is_sent
                if not is_sent and not has_failed:
                    has_failed = True
                    self._say(f"{self._endpoint} does not take spans; training goes on, and later ones are tried")
        exporter.shutdown()

    def _resource(self) -> Any:
        """Return the OpenTelemetry resource of the spans; OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME add to it."""
        from opentelemetry.sdk.resources import Resource

        attempt, spec = own_attempt(), self._job.spec
        environment = spec.rollout.environment or spec.rollout.agent
        known = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "rlhf"),
            "rl.system": "rlhf-operator",
            "rl.run.id": attempt.job_uid if attempt else str(self._folder.path.resolve()),
            "rl.algorithm": spec.algorithm.name,
            "rl.environment.name": environment.entrypoint if environment else None,
            "rlhf.job": self._job.name,
            "rlhf.attempt": attempt.number if attempt else None,
        }
        return Resource.create({name: value for name, value in known.items() if value is not None})

    def _say(self, message: str) -> None:
        report_output(self._folder, self._warn, f"{self._job.name}: {FIELD}", message)


def require_package() -> None:
    """Raise ModuleNotFoundError without OpenTelemetry's packages."""
    import opentelemetry.exporter.otlp.proto.http
    import opentelemetry.sdk.trace  # noqa: F401


def _exporter(endpoint: str) -> Any:
    import requests
    from opentelemetry.exporter.otlp.proto.http import trace_exporter

    logging.getLogger(trace_exporter.__name__).disabled = True  # `_say` reports the first failure
    session = None if any("CREDENTIAL_PROVIDER" in name for name in os.environ) else requests.Session()
    if session:  # else the exporter gets one from OpenTelemetry's credential provider
        session.hooks["response"].append(_refuse_redirection)
    return trace_exporter.OTLPSpanExporter(endpoint=endpoint, session=session)


def _refuse_redirection(answer: Any, **_: object) -> None:
    """Raise ValueError for an answer 3xx, which the exporter would count as success."""
    if 300 <= answer.status_code < 400:
        raise ValueError(f"the answer is {answer.status_code}")


def trace_of(report: StepReport, resource: Any) -> Iterator[Any]:
    """Yield a step's spans as OpenTelemetry spans of one trace, whose root is the step; resource: as by `_resource`."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, TraceFlags

    trace, scope = secrets.randbits(128) or 1, InstrumentationScope("rlhf-operator", version("rlhf-operator"))
    contexts = {span.id: SpanContext(trace, span.id, False, TraceFlags(TraceFlags.SAMPLED)) for span in report.spans}
    root = report.spans[0].id
    for span in report.spans:
        name, attributes = described(span, is_step=span.id == root)
        yield ReadableSpan(
            name=name,
            context=contexts[span.id],
            parent=None if span.id == root else contexts.get(span.parent, contexts[root]),
            resource=resource,
            attributes={**attributes, "rlhf.step": int(report.record["step"])},
            instrumentation_scope=scope,
            start_time=round(1e9 * span.start),
            end_time=round(1e9 * span.end),
        )


def described(span: Span, *, is_step: bool) -> tuple[str, dict[str, str | int]]:
    """Return a span's name and attributes by the conventions of OpenTelemetry."""
    attributes: dict[str, str | int] = {"rlhf.phase": span.phase, "rlhf.name": span.name, "rlhf.rank": span.rank}
    attributes |= {"rlhf.pool": span.pool} if span.pool else {}
    if is_step:
        return "rl.loop", attributes
    if span.phase == TOOL:
        attributes |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": span.name}
        return f"execute_tool {span.name}", attributes
    if span.phase == MODEL_CALL:
        return "chat", attributes | {"gen_ai.operation.name": "chat"}
    is_reward = span.phase == "scoring" and span.name.startswith(REWARDS)
    return "rl.reward" if is_reward else NAMES.get(span.phase, f"rlhf.{span.phase}"), attributes
