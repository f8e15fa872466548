"""The graph of a step: the calls of an algorithm's listing, and the fields that move between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """A node: one call of a method of a model."""

    number: int
    """Position in the order of the calls, from 0."""
    name: str
    """model.method."""
    arguments: Mapping[str, Any]
    phase: str
    pool: str
    protocol: str
    level: int
    """A call waits for calls of lower levels only; of one level there is at most one in a pool."""
    adds: Mapping[str, int]
    """Field -> its bytes, at most."""
    row_by_row: bool = False
    """Whether it may be made on some rows before there are others."""
    in_groups: bool = False
    """Whether its rows leave it in groups, as they end."""

    @property
    def label(self) -> str:
        """Name and arguments."""
        arguments = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.name}({arguments})" if arguments else self.name


@dataclass(frozen=True, kw_only=True)
class FieldTransfer:
    """A field on an edge."""

    name: str
    """As it is read."""
    added_as: str
    """Its name where it was added; another one if `with_prefixed` gave it a prefix."""
    bytes: int
    """What all ranks of the consumer read of it together, at most."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """What a call reads of the fields that another one added."""

    producer: int
    consumer: int
    fields: tuple[FieldTransfer, ...]
    split: int
    """S(0): the consumer's protocol cuts the batch into so many blocks of rows."""
    broadcast: int
    """B: so many ranks of the consumer get each row."""
    summed: int
    """P: so many ranks of the producer hold partial sums of each row."""

    @property
    def bytes(self) -> int:
        return sum(moved.bytes for moved in self.fields)

    @property
    def spread(self) -> str:
        """What it splits, broadcasts and sums: `S(0)/2 B*2 P+2`, in the words of `protocols.AxisPlacement`."""
        parts = [f"S(0)/{self.split}"]
        parts += [f"B*{self.broadcast}"] if self.broadcast > 1 else []
        parts += [f"P+{self.summed}"] if self.summed > 1 else []
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The calls of a step in their order, and what moves between them."""

    rows: int
    calls: tuple[Call, ...]
    edges: tuple[Edge, ...]

    @property
    def by_level(self) -> list[Call]:
        """The calls in the order of their levels."""
        return sorted(self.calls, key=lambda call: (call.level, call.number))

    def producers(self, call: Call) -> list[int]:
        """Numbers of the calls whose fields a call reads."""
        return [edge.producer for edge in self.edges if edge.consumer == call.number]

    @property
    def bytes(self) -> int:
        """Bytes that all ranks read in a step, at most."""
        return sum(edge.bytes for edge in self.edges)
