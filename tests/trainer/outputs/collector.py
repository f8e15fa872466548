"""A collector of OpenTelemetry: a server that decodes what it gets by OTLP's own messages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Got:
    """A span as it came; times in nanoseconds."""

    name: str
    trace: bytes
    id: bytes
    parent: bytes
    start: int
    end: int
    attributes: dict[str, Any]


class Event(NamedTuple):
    """What a span is, whichever way it went; times in microseconds from the first span."""

    phase: str
    name: str
    rank: int
    step: int
    start: int
    end: int


class Collector:
    """A server on this machine while the block runs; `headers` are those of the last request."""

    def __init__(self) -> None:
        self.spans: list[Got] = []
        self.resource: dict[str, Any] = {}
        self.headers: dict[str, str] = {}
        self.status = 200
        taker = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                taker.headers = {name.lower(): value for name, value in self.headers.items()}
                taker.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(taker.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, request: Any) -> None:
        for part in request.resource_spans:
            self.resource = values(part.resource.attributes)
            for span in (each for scope in part.scope_spans for each in scope.spans):
                times = span.start_time_unix_nano, span.end_time_unix_nano
                ids = span.trace_id, span.span_id, span.parent_span_id
                self.spans.append(Got(span.name, *ids, *times, values(span.attributes)))

    def parent_of(self, span: Got) -> Got | None:
        """The span within which this one lies; None for a root. KeyError if it never came."""
        return {each.id: each for each in self.spans}[span.parent] if span.parent else None


def values(attributes: Sequence[Any]) -> dict[str, Any]:
    """Attributes of OTLP as a mapping."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def in_microseconds(spans: Sequence[Got]) -> list[Event]:
    """The spans that came, in order."""
    origin = min(each.start for each in spans)
    return sorted(
        Event(
            phase=each.attributes["rlhf.phase"],
            name=each.attributes["rlhf.name"],
            rank=each.attributes["rlhf.rank"],
            step=each.attributes["rlhf.step"],
            start=round((each.start - origin) / 1000),
            end=round((each.end - origin) / 1000),
        )
        for each in spans
    )


def assert_same(one: Sequence[Event], other: Sequence[Event]) -> None:
    """The same spans, whose times were rounded in two ways."""
    assert [each[:4] for each in one] == [each[:4] for each in other]
    for mine, its in zip(one, other, strict=True):
        assert max(abs(mine.start - its.start), abs(mine.end - its.end)) <= 2, (mine, its)


def traced(events: Sequence[dict[str, Any]]) -> list[Event]:
    """The spans in the events of a trace.json, in order; an asynchronous event is ended by another of its id."""
    found, opened = [], dict[str, list[dict[str, Any]]]()
    for event in events:
        if event["ph"] == "X":
            found.append((event["cat"], event, event["ts"] + event["dur"]))
        elif event["ph"] == "b":
            opened.setdefault(event["id"], []).append(event)
        elif event["ph"] == "e":
            began = opened[event["id"]].pop()
            assert began["name"] == event["name"]
            found.append((began["args"]["phase"], began, event["ts"]))
    assert not any(opened.values())
    return sorted(
        Event(phase, each["name"], each["tid"], each["args"]["step"], round(each["ts"]), round(end))
        for phase, each, end in found
    )
