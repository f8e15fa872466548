"""One step as a graph, recorded with futures that have shapes only: the step is called, and nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

from rlhf_api.problems import suggestion
from rlhf_api.spec.custom_algorithm import own_place
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_planning.step_graph import Call, Edge, FieldTransfer, Graph
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.fields import FIELDS, UNDECLARED, FieldType, Widths
from rlhf_trainer.protocols import TransferProtocol
from rlhf_trainer.types import Transfer, prefixed


@dataclass(frozen=True)
class Origin:
    """A field, and the call that added it."""

    name: str
    type: FieldType
    producer: int
    summed: int


@dataclass(frozen=True)
class ShapeFuture:
    """A batch of which only the shapes are known."""

    fields: Mapping[str, Origin] = field(default_factory=dict)
    step: int = 1
    """The number that every batch has."""

    def with_prefixed(self, **others: ShapeFuture) -> ShapeFuture:
        """This batch, and the fields of others of the same rows as `<name>_<field>`."""
        return replace(self, fields={**self.fields, **prefixed(others)})


class NoValue:
    """The value of a call that does not run."""

    def result(self) -> NoReturn:
        raise TypeError("the step waits for a value of a call, so what it calls is not known before it runs")


class Recording:
    """A model whose calls are recorded."""

    def __init__(self, name: str, worker_class: type, calls: Mapping[str, Callable[..., object]]) -> None:
        self._name, self._worker_class, self._calls = name, worker_class, calls

    def with_calls(self, **calls: Callable[..., object]) -> Recording:
        """Return a copy in which other functions make these calls."""
        return Recording(self._name, self._worker_class, {**self._calls, **calls})

    def __getattr__(self, method: str) -> Callable[..., object]:
        if method in self._calls:
            return self._calls[method]
        if unmarked := getattr(self._worker_class, method, None):
            raise AttributeError(f"{self._name}.{method}{own_place(unmarked)} is not marked by register")
        raise AttributeError(f"{self._name} has no method {method}; {suggestion(method, self._calls)}")


@dataclass(frozen=True)
class ModelLocation:
    """Pool and layout of a model."""

    pool: str
    layout: ParallelSizes


class Tracer:
    """Records the calls of a step on its models, for batches of `rows` rows of the largest width."""

    def __init__(self, *, rows: int, widths: Widths) -> None:
        self._rows = rows
        self._widths = widths
        self._calls: list[Call] = []
        self._edges: list[Edge] = []
        self._last: dict[str, int] = {}

    def model(self, name: str, spec: WorkerSpec, location: ModelLocation) -> Recording:
        """Return a model like a `ModelHandle`, whose calls are recorded."""
        calls = {
            key: partial(self._call, f"{name}.{key}", spec.code_of(key), each, location)
            for key, each in spec.transfers.items()
        }
        return Recording(name, spec.worker_class, calls)

    def graph(self) -> Graph:
        """Return the recorded graph."""
        return Graph(rows=self._rows, calls=tuple(self._calls), edges=tuple(self._edges))

    def _call(
        self,
        name: str,
        method: Callable[..., object],
        transfer: Transfer,
        location: ModelLocation,
        batch: ShapeFuture | None = None,
        **arguments: object,
    ) -> ShapeFuture | NoValue:
        """Record a call; KeyError if it reads a field that nobody has added, with the line of an own method."""
        number, fields = len(self._calls), batch.fields if batch else {}
        if missing := [key for key in transfer.reads if key not in fields]:
            held = ", ".join(fields) or "nothing"
            raise KeyError(f"{name}{own_place(method)} reads {', '.join(missing)}; the batch holds {held}")
        edges = self._edges_of(
            number, {key: fields[key] for key in transfer.fields_read(fields)}, transfer, location.layout
        )
        before = [self._calls[edge.producer].level for edge in edges] + [self._last.get(location.pool, -1)]
        added = {key: FIELDS.get(key, UNDECLARED) for key in transfer.adds or ()}
        call = Call(
            number=number,
            name=name,
            arguments=arguments,
            phase=transfer.phase,
            pool=location.pool,
            protocol=transfer.protocol.name,
            level=1 + max(before),
            adds={key: self._rows * each.row_bytes(self._widths) for key, each in added.items()},
            row_by_row=transfer.row_by_row,
            in_groups=transfer.in_groups,
        )
        self._calls.append(call)
        self._edges += edges
        self._last[location.pool] = call.level
        if batch is None or transfer.adds is None:
            return NoValue()
        summed = max(map(len, transfer.protocol.collect(location.layout)))
        made = {key: Origin(key, each, number, summed) for key, each in added.items()}
        return replace(batch, fields={**fields, **made})

    def _edges_of(
        self, consumer: int, read: Mapping[str, Origin], transfer: Transfer, layout: ParallelSizes
    ) -> list[Edge]:
        """An edge from each producer of the fields that are read."""
        split, fetched = rows_sent(transfer.protocol, layout, self._rows)
        edges = []
        for producer in sorted({origin.producer for origin in read.values()}):
            mine = {key: origin for key, origin in read.items() if origin.producer == producer}
            summed, copies = max(origin.summed for origin in mine.values()), fetched // self._rows
            moved = tuple(
                FieldTransfer(name=key, added_as=each.name, bytes=fetched * each.type.row_bytes(self._widths) * summed)
                for key, each in mine.items()
            )
            ends = {"producer": producer, "consumer": consumer}
            edges.append(Edge(**ends, fields=moved, split=split, broadcast=copies, summed=summed))
        return edges


def rows_sent(protocol: TransferProtocol, layout: ParallelSizes, rows: int) -> tuple[int, int]:
    """(different blocks of rows that a protocol makes of a batch, rows that all ranks get together)."""
    shares = protocol.distribute(layout, rows)
    return len({(share.start, share.stop) for share in shares}), sum(map(len, shares))
