"""Texts of the graph of a step: tables of 100 columns, and a mermaid flowchart."""

from rich.console import Console
from rich.table import Table

from rlhf_planning.numbers import size_text
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


def mermaid_of(graph: Graph) -> str:
    """Return the graph as a mermaid flowchart: pools are boxes, calls nodes, and edges arrows with field names."""
    lines = ["flowchart TD"]
    for place, pool in enumerate(dict.fromkeys(call.pool for call in graph.calls)):
        nodes = [f'    call{call.number}["{call.label}"]' for call in graph.calls if call.pool == pool]
        lines += [f'  subgraph pool{place}["{pool}"]', *nodes, "  end"]
    for edge in graph.edges:
        fields = ", ".join(moved.name for moved in edge.fields)
        lines.append(f'  call{edge.producer} -->|"{fields}, {size_text(edge.bytes)}"| call{edge.consumer}')
    return "\n".join(lines) + "\n"
