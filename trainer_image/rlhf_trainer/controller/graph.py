"""Recording of a step as a graph: the step is called with stand-ins that have shapes only, and no worker runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from rlhf_api.problems import suggestion
from rlhf_api.spec.custom_algorithm import own_place
from rlhf_api.spec.parallel_sizes import Axis, ParallelSizes
from rlhf_planning.step_graph import Call, Edge, FieldTransfer, Graph
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.fields import FIELDS, UNDECLARED, FieldType, Widths
from rlhf_trainer.protocols import AxisPlacement
from rlhf_trainer.types import HasFields, Transfer


@dataclass(frozen=True)
class Origin:
    """Name and type of a field in a recorded step, and the number of the call that added the field."""

    name: str
    type: FieldType
    producer: int


@dataclass(frozen=True, kw_only=True)
class ShapeFuture(HasFields[Origin]):
    """Stand-in for a batch while a step is recorded: field names and types without data."""

    step: int = 1


class NoValue:
    """Result of a recorded call that would return a value; reading it is an error, as nothing runs."""

    def result(self) -> NoReturn:
        raise TypeError("the step waits for a value of a call, so what it calls is not known before it runs")


class Recording:
    """Stand-in for a model while a step is recorded: its method calls are recorded and do not run."""

    def __init__(self, name: str, worker_class: type, calls: Mapping[str, Callable[..., object]]) -> None:
        self._name, self._worker_class, self._calls = name, worker_class, calls

    def __getattr__(self, method: str) -> Callable[..., object]:
        if method in self._calls:
            return self._calls[method]
        if unmarked := getattr(self._worker_class, method, None):
            raise AttributeError(f"{self._name}.{method}{own_place(unmarked)} is not marked by register")
        raise AttributeError(f"{self._name} has no method {method}; {suggestion(method, self._calls)}")


class Tracer:
    """Recorder of the calls that a step makes on its models, for batches of `rows` rows of the largest width."""

    def __init__(self, *, rows: int, widths: Widths) -> None:
        self._rows, self._widths = rows, widths
        self._calls: list[Call] = []
        self._edges: list[Edge] = []
        self._last: dict[str, int] = {}
        self._addends: list[tuple[int, tuple[Axis, ...]]] = []
        """(number of ranks whose outputs add up to a row's fields, axes along which these ranks lie), for each call."""

    def model(self, name: str, spec: WorkerSpec, pool: str, layout: ParallelSizes) -> Recording:
        """Return a stand-in for a `ModelHandle` that records its calls; layout: of the model over the pool's ranks."""
        calls = {
            key: partial(self._call, f"{name}.{key}", spec.code_of(key), each, pool, layout)
            for key, each in spec.transfers.items()
        }
        return Recording(name, spec.worker_class, calls)

    def graph(self) -> Graph:
        """Return the graph of the calls recorded so far."""
        return Graph(rows=self._rows, calls=tuple(self._calls), edges=tuple(self._edges))

    def _call(
        self,
        name: str,
        method: Callable[..., object],
        transfer: Transfer,
        pool: str,
        layout: ParallelSizes,
        batch: ShapeFuture | None = None,
        **arguments: object,
    ) -> ShapeFuture | NoValue:
        """Record a call; errors name the file and line of a user's method.

        KeyError if the call reads a field that no call has added; ValueError if its protocol does not fit its layout.
        """
        number, fields, protocol = len(self._calls), batch.fields if batch else {}, transfer.protocol
        if missing := [key for key in transfer.reads if key not in fields]:
            held = ", ".join(fields) or "nothing"
            raise KeyError(f"{name}{own_place(method)} reads {', '.join(missing)}; the batch holds {held}")
        given = protocol.distribute(layout, self._rows)
        if batch and (misfit := protocol.misfit(layout, given, self._rows, adds=bool(transfer.adds))):
            raise ValueError(f"{name}{own_place(method)}: {misfit}")
        edges = self._edges_to(number, fields, transfer, layout, given)
        before = [self._calls[edge.producer].level for edge in edges] + [self._last.get(pool, -1)]
        ranks = max(map(len, protocol.collect(layout)), default=1)
        self._addends.append((ranks, protocol.axes(layout)[AxisPlacement.PARTIAL]))
        added = {key: Origin(key, FIELDS.get(key, UNDECLARED), number) for key in transfer.adds or ()}
        call = Call(
            number=number,
            name=name,
            arguments=arguments,
            phase=transfer.phase,
            pool=pool,
            level=1 + max(before),
            adds={key: self._rows * each.type.row_bytes(self._widths) for key, each in added.items()},
            row_by_row=transfer.row_by_row,
            in_groups=transfer.in_groups,
        )
        self._calls.append(call)
        self._edges += edges
        self._last[pool] = call.level
        if batch is None or transfer.adds is None:
            return NoValue()
        return batch.with_fields(added)

    def _edges_to(
        self,
        consumer: int,
        fields: Mapping[str, Origin],
        transfer: Transfer,
        layout: ParallelSizes,
        given: Sequence[range],
    ) -> list[Edge]:
        split, fetched = len({(share.start, share.stop) for share in given}), sum(map(len, given))
        axes = transfer.protocol.axes(layout)
        by_producer: dict[int, dict[str, Origin]] = {}
        for key in transfer.fields_read(fields):
            by_producer.setdefault(fields[key].producer, {})[key] = fields[key]
        edges = []
        for producer, read in sorted(by_producer.items()):
            summed, summed_axes = self._addends[producer]
            moved = tuple(
                FieldTransfer(name=key, added_as=each.name, bytes=fetched * each.type.row_bytes(self._widths) * summed)
                for key, each in read.items()
            )
            parts = {
                "S(0)/": (split, axes[AxisPlacement.SPLIT]),
                "B*": (fetched // self._rows, axes[AxisPlacement.BROADCAST]),
                "P+": (summed, summed_axes),
            }
            spread = (
                f"{mark}{count} {'*'.join(along)}".strip()
                for mark, (count, along) in parts.items()
                if mark == "S(0)/" or count > 1
            )
            edges.append(Edge(producer=producer, consumer=consumer, fields=moved, spread=", ".join(spread)))
        return edges
