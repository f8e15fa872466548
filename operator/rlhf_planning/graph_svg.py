"""The graph of a step as SVG: a row a call, in the lane of its pool and on its level, and a line a field.

A field's line begins with a full dot at the call that adds it and has a ring at each call that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from rlhf_planning.graph_text import label_of, size_text, spread_of
from rlhf_planning.step_graph import Call, Graph

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
COLOURS = ("#2f6fb3", "#b3562f", "#3f8a52", "#8a4fa3", "#8a7a1f", "#4a8a8a")
INK, FAINT, BAND = "#24292f", "#6e7781", "#f3f5f8"
MARGIN, LEVEL, ROW, BOX, COLUMN = 16, 48, 34, 24, 21
LETTER, SMALL = 7.2, 6.0
"""Width of a letter of a call's and of a field's name, in pixels, rounded up."""
TITLE, SLANT = 52, 55
"""Height of the title; degrees by which the names of the fields are turned."""
LEAST_WIDTH = 600
"""Room for the legend."""


class Drawing:
    """Where everything is, and the shapes drawn so far."""

    def __init__(self, graph: Graph, pools: Sequence[str]) -> None:
        self.graph = graph
        self.pools = list(pools)
        self.rows = {call.number: row for row, call in enumerate(graph.by_level)}
        self.shapes: list[str] = []
        self.lane = int(max(len(label_of(call)) for call in graph.calls) * LETTER) + 34
        self.columns = {
            (call.number, name): place
            for place, (call, name) in enumerate((call, name) for call in graph.calls for name in call.adds)
        }
        self.first_column = MARGIN + LEVEL + self.lane * len(self.pools) + 24
        longest = max(len(self.label(*column)) for column in self.columns) * SMALL
        self.top = int(TITLE + longest * math.sin(math.radians(SLANT))) + 24
        """Where the first row begins."""
        right = self.first_column + COLUMN * len(self.columns) + longest * math.cos(math.radians(SLANT))
        self.width = max(LEAST_WIDTH, int(right))
        self.height = self.top + ROW * len(graph.calls) + 56

    def y(self, number: int) -> float:
        """The middle of a call's row."""
        return self.top + ROW * (self.rows[number] + 0.5)

    def x(self, producer: int, name: str) -> float:
        """The line of a field."""
        return self.first_column + COLUMN * (self.columns[producer, name] + 0.5)

    def label(self, producer: int, name: str) -> str:
        """Name and bytes of a field."""
        return f"{name}  {size_text(self.graph.calls[producer].adds[name])}"

    def colour(self, call: Call) -> str:
        """That of the call's pool."""
        return COLOURS[self.pools.index(call.pool) % len(COLOURS)]

    def text(self, x: float, y: float, content: str, **style: object) -> None:
        """Add a text; underscores of a style's name stand for hyphens."""
        attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(content)}</text>')


def svg_of(graph: Graph, *, title: str, pools: Sequence[str]) -> str:
    """The drawing; `pools` are the lanes from left to right."""
    drawing = Drawing(graph, pools)
    _heads(drawing, title)
    _bands(drawing)
    _fields(drawing)
    for call in graph.calls:
        _call(drawing, call)
    size = f'width="{drawing.width}" height="{drawing.height}" viewBox="0 0 {drawing.width} {drawing.height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="12" fill="{INK}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *drawing.shapes, "</svg>"]) + "\n"


def _heads(drawing: Drawing, title: str) -> None:
    """Title, names of the lanes and of the fields with their bytes, and the legend."""
    graph, base = drawing.graph, drawing.top - 12
    name, _, where = title.partition(". ")
    drawing.text(MARGIN, 24, name, font_size=15, font_weight=600)
    drawing.text(MARGIN, 44, where, fill=FAINT)
    drawing.text(MARGIN, base, "level", fill=FAINT)
    for place, pool in enumerate(drawing.pools):
        x = MARGIN + LEVEL + drawing.lane * (place + 0.5)
        drawing.text(x, base, f"pool {pool}", text_anchor="middle", fill=COLOURS[place % len(COLOURS)], font_weight=600)
    for producer, field in drawing.columns:
        x, label = drawing.x(producer, field) + 4, drawing.label(producer, field)
        drawing.text(x, base, label, transform=f"rotate(-{SLANT} {x:.1f} {base})", font_size=11)
    y = drawing.height - 20
    total = f"{graph.rows} rows; all ranks fetch {size_text(graph.bytes)} at most."
    legend = "Full dot: the call adds the field. Ring: it reads it. A call waits for calls of lower levels only."
    drawing.text(MARGIN, y - 16, legend, fill=FAINT, font_size=11)
    drawing.text(MARGIN, y, f"{total} Sizes are those of the longest prompts and responses.", fill=FAINT, font_size=11)


def _bands(drawing: Drawing) -> None:
    """A band for every level, every other one shaded, with its number."""
    right = drawing.first_column + COLUMN * len(drawing.columns) + 8
    shown = -1
    for call in drawing.graph.by_level:
        top = drawing.y(call.number) - ROW / 2
        if call.level % 2 == 0:
            drawing.shapes.append(
                f'<rect x="{MARGIN - 6}" y="{top}" width="{right - MARGIN}" height="{ROW}" fill="{BAND}"/>'
            )
        if call.level != shown:
            drawing.text(MARGIN + 22, top + ROW / 2 + 4, str(call.level), text_anchor="end", fill=FAINT)
        shown = call.level


def _fields(drawing: Drawing) -> None:
    """The line of every field down to its last reader."""
    end: dict[tuple[int, str], float] = {}
    for edge in drawing.graph.edges:
        for key in ((edge.producer, moved.added_as) for moved in edge.fields):
            end[key] = max(end.get(key, 0.0), drawing.y(edge.consumer))
    for (producer, field), y in end.items():
        line = f"M{drawing.x(producer, field)} {drawing.y(producer)}V{y}"
        colour = drawing.colour(drawing.graph.calls[producer])
        drawing.shapes.append(f'<path d="{line}" stroke="{colour}" stroke-width="1.6" fill="none"/>')


def _call(drawing: Drawing, call: Call) -> None:
    """The box of a call, and its dots and rings, which a thin line ties to it."""
    y, colour, graph = drawing.y(call.number), drawing.colour(call), drawing.graph
    left = MARGIN + LEVEL + drawing.lane * drawing.pools.index(call.pool) + 8
    width = drawing.lane - 16
    read = [(edge, moved) for edge in graph.edges if edge.consumer == call.number for moved in edge.fields]
    dots = [drawing.x(edge.producer, moved.added_as) for edge, moved in read]
    dots += [drawing.x(call.number, name) for name in call.adds]
    if dots:
        drawing.shapes.append(f'<path d="M{left + width} {y}H{max(dots)}" stroke="{colour}" stroke-opacity="0.35"/>')
    drawing.shapes.append(
        f'<rect x="{left}" y="{y - BOX / 2}" width="{width}" height="{BOX}" rx="5" fill="#ffffff" stroke="{colour}" '
        f'stroke-width="1.4"/>'
    )
    drawing.text(left + width / 2, y + 4, label_of(call), text_anchor="middle")
    for edge, moved in read:
        what = f"{label_of(call)} reads {moved.name}: {spread_of(edge)}, {size_text(moved.bytes)} at most"
        drawing.shapes.append(_dot(drawing.x(edge.producer, moved.added_as), y, what, fill="#ffffff", stroke=colour))
    for name, size in call.adds.items():
        what = f"{label_of(call)} adds {name}: {size_text(size)} at most"
        drawing.shapes.append(_dot(drawing.x(call.number, name), y, what, fill=colour, stroke=colour))


def _dot(x: float, y: float, what: str, *, fill: str, stroke: str) -> str:
    """A dot that says what it is when it is pointed at."""
    circle = f'<circle cx="{x}" cy="{y}" r="4.2" fill="{fill}" stroke="{stroke}" stroke-width="1.8">'
    return f"{circle}<title>{escape(what)}</title></circle>"
