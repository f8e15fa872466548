"""Graph of a step: the calls of an algorithm's listing, and the fields that move between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """Node of the graph: one call of a method of a model."""

    number: int
    """Position in the order of the calls, from 0."""
    name: str
    """Model and method: `actor.update_actor`."""
    arguments: Mapping[str, Any]
    phase: str
    pool: str
    level: int
    """Level of the call: it waits only for calls of lower levels; a pool has at most one call of each level."""
    adds: Mapping[str, int]
    """Fields that the call adds to the batch -> bytes of the field, at most."""
    row_by_row: bool = False
    """Whether the call may run on the first finished rows before the batch's other rows exist."""
    in_groups: bool = False
    """Whether the call hands on finished rows, some at a time, before it ends."""

    @property
    def label(self) -> str:
        """Return name and arguments of the call as text."""
        arguments = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.name}({arguments})" if arguments else self.name


@dataclass(frozen=True, kw_only=True)
class FieldTransfer:
    """Transfer of one field along an edge of the graph: its names at both ends, and its size in bytes."""

    name: str
    """Name under which the consumer reads the field."""
    added_as: str
    """Name under which the producer added the field; it differs from `name` if `with_prefixed` renamed the field."""
    bytes: int
    """Bytes that all ranks of the consumer read together, at most; 0 if only a run knows the field's size."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Edge of the graph: fields that one call added and another call reads."""

    producer: int
    consumer: int
    fields: tuple[FieldTransfer, ...]
    spread: str
    """How rows are split, broadcast and summed: `S(0)/2 data, B*2 tensor, P+2 context`, as `AxisPlacement` writes it.

    S(0): blocks of rows into which the consumer's protocol cuts the batch; B: ranks of the consumer that get each row;
    P: ranks of the producer that hold partial sums of each row; then the axes of the layout, if they are known.
    """

    @property
    def bytes(self) -> int:
        return sum(moved.bytes for moved in self.fields)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Calls of a step in their order, and the fields that move between them."""

    rows: int
    calls: tuple[Call, ...]
    edges: tuple[Edge, ...]

    @property
    def by_level(self) -> list[Call]:
        return sorted(self.calls, key=lambda call: (call.level, call.number))

    @property
    def bytes(self) -> int:
        """Return the most bytes of fields that the ranks of all calls read in a step, summed over the edges."""
        return sum(edge.bytes for edge in self.edges)
