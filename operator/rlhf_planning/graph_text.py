"""Text of the graph of a step: tables of 100 columns."""

from rich.console import Console
from rich.table import Table

from rlhf_planning.step_graph import Graph

COLUMNS = 100
LEGEND = """\
A call waits for calls of lower levels only; those of one level are on different pools and overlap.
a -> b: b reads fields that a added. S(0)/n: the rows are split into n blocks; B*n: n ranks of b get
each row; P+n: n ranks of a hold addends of it; each over the named axes. Bytes are those that all
ranks of b read, if every prompt and response is as long as it may be; a field with ? counts none,
as only a run knows its size."""


def text_of(graph: Graph, *, title: str) -> str:
    """Return the graph as text: a line for each call and each edge; a long list of fields goes on in the next line."""
    calls = Table(box=None, pad_edge=False)
    for name in ("#", "level", "pool", "call", "reads of", "adds"):
        calls.add_column(name, justify="right" if name in ("#", "level") else "left", no_wrap=name == "call")
    for call in graph.by_level:
        producers = " ".join(str(edge.producer) for edge in graph.edges if edge.consumer == call.number)
        calls.add_row(str(call.number), str(call.level), call.pool, call.label, producers, ", ".join(call.adds))
    moved = Table(box=None, pad_edge=False)
    for name in ("edge", "spread", "bytes", "fields"):
        moved.add_column(name, justify="right" if name in ("edge", "bytes") else "left", no_wrap=name != "fields")
    for edge in graph.edges:
        names = ", ".join(f"{each.name}{'?' * (not each.bytes)}" for each in edge.fields)
        moved.add_row(f"{edge.producer} -> {edge.consumer}", edge.spread, f"{edge.bytes:,}", names)
    console = Console(width=COLUMNS, highlight=False, color_system=None)
    total = f"{graph.rows} rows, {graph.bytes:,} bytes read at most"
    with console.capture() as shown:
        console.print(f"{title}: {total}", "", calls, "", moved, sep="\n", markup=False)
    return "\n".join(line.rstrip() for line in shown.get().splitlines())
