"""The graph of a step as text of 100 columns: the calls by level, and what moves between them."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO

from rich.console import Console
from rich.table import Table

from rlhf_planning.step_graph import Call, Edge, Graph

COLUMNS = 100
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
LEGEND = """\
A call waits for calls of lower levels only; those of one level are on different pools and overlap.
a -> b: b reads fields that a added. S(0)/n: the rows are split into n blocks; B*n: n ranks of b get
each row; P+n: n ranks of a hold addends of it. Bytes are those that all ranks of b fetch, if every
prompt and response is as long as it may be."""


def text_of(graph: Graph, *, title: str) -> str:
    """A line a call and a line an edge; a long list of fields goes on in the next line."""
    calls = Table(box=None, pad_edge=False)
    for name in ("#", "level", "pool", "call", "reads of", "adds"):
        calls.add_column(name, justify="right" if name in ("#", "level") else "left", no_wrap=name == "call")
    for call in graph.by_level:
        producers = " ".join(map(str, graph.producers(call)))
        calls.add_row(str(call.number), str(call.level), call.pool, label_of(call), producers, ", ".join(call.adds))
    moved = Table(box=None, pad_edge=False)
    for name in ("edge", "spread", "bytes", "fields"):
        moved.add_column(name, justify="right" if name in ("edge", "bytes") else "left", no_wrap=name != "fields")
    for edge in graph.edges:
        ends = f"{edge.producer} -> {edge.consumer}"
        moved.add_row(ends, spread_of(edge), size_text(edge.bytes), ", ".join(moved.name for moved in edge.fields))
    console = Console(width=COLUMNS, file=StringIO(), highlight=False, color_system=None)
    total = f"{graph.rows} rows, {size_text(graph.bytes)} fetched at most"
    console.print(f"{title}: {total}", "", calls, "", moved, sep="\n", markup=False)
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def label_of(call: Call) -> str:
    """Name and arguments of a call."""
    return call.name + (f"({arguments_text(call.arguments)})" if call.arguments else "")


def arguments_text(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


def spread_of(edge: Edge) -> str:
    """What an edge splits, broadcasts and sums: `S(0)/2 B*2 P+2`, in the words of `protocols.Spread`."""
    parts = [f"S(0)/{edge.split}"]
    parts += [f"B*{edge.broadcast}"] if edge.broadcast > 1 else []
    parts += [f"P+{edge.summed}"] if edge.summed > 1 else []
    return " ".join(parts)


def size_text(size: float) -> str:
    """Bytes with a decimal unit."""
    for unit in UNITS:
        if size < 1000 or unit == UNITS[-1]:
            break
        size /= 1000
    return f"{size:.3g} {unit}"
