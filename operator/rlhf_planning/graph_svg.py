"""The graph of a step as SVG: a row a call, in the lane of its pool and on its level, and a line a field.

A field's line begins with a full dot at the call that adds it and has a ring at each call that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from rlhf_planning.numbers import size_text
from rlhf_planning.step_graph import Call, Graph
from rlhf_planning.svg import BAND, FAINT, MARGIN, WHITE, Picture

COLOURS = ("#2f6fb3", "#b3562f", "#3f8a52", "#8a4fa3", "#8a7a1f", "#4a8a8a")
LEVEL, ROW, BOX, COLUMN = 48, 34, 24, 21
LETTER, SMALL = 7.2, 6.0
"""Width of a letter of a call's and of a field's name, in pixels, rounded up."""
TITLE, SLANT = 52, 55
"""Height of the title; degrees by which the names of the fields are turned."""
LEAST_WIDTH = 600
"""Room for the legend."""


def svg_of(graph: Graph, *, title: str, pools: Sequence[str]) -> str:
    """The picture; `pools` are the lanes from left to right."""
    drawing = _Drawing(graph, title, pools)
    drawing.heads()
    drawing.levels()
    drawing.lines()
    for call in graph.calls:
        drawing.call(call)
    return drawing.svg(drawing.width, drawing.height)


class _Drawing(Picture):
    """Where everything is."""

    def __init__(self, graph: Graph, title: str, pools: Sequence[str]) -> None:
        name, _, where = title.partition(". ")
        super().__init__(name, where)
        self.graph, self.pools = graph, list(pools)
        self.lane = int(max(len(call.label) for call in graph.calls) * LETTER) + 34
        self.left = MARGIN + LEVEL + self.lane * len(self.pools) + 24
        """Where the columns of the fields begin."""
        fields = [(call.number, name) for call in graph.calls for name in call.adds]
        self.x = {field: self.left + COLUMN * (place + 0.5) for place, field in enumerate(fields)}
        """(number of the call that adds it, name) of a field -> its line."""
        self.names = {(number, name): f"{name}  {size_text(graph.calls[number].adds[name])}" for number, name in fields}
        longest, turned = max(map(len, self.names.values())) * SMALL, math.radians(SLANT)
        self.top = int(TITLE + longest * math.sin(turned)) + 24
        self.y = {call.number: self.top + ROW * (row + 0.5) for row, call in enumerate(graph.by_level)}
        """Number of a call -> the middle of its row."""
        self.width = max(LEAST_WIDTH, int(self.left + COLUMN * len(fields) + longest * math.cos(turned)))
        self.height = self.top + ROW * len(graph.calls) + 56

    def colour(self, pool: str) -> str:
        return COLOURS[self.pools.index(pool) % len(COLOURS)]

    def heads(self) -> None:
        """Names of the lanes and of the fields with their bytes, and the legend."""
        base, low = self.top - 12, self.height - 20
        self.text(MARGIN, base, "level", fill=FAINT)
        for place, pool in enumerate(self.pools):
            x = MARGIN + LEVEL + self.lane * (place + 0.5)
            self.text(x, base, f"pool {pool}", text_anchor="middle", fill=self.colour(pool), font_weight=600)
        for field, name in self.names.items():
            x = self.x[field] + 4
            self.text(x, base, name, transform=f"rotate(-{SLANT} {x:.1f} {base})", font_size=11)
        self.small(
            MARGIN,
            low - 16,
            "Full dot: the call adds the field. Ring: it reads it. A call waits for calls of lower levels only.",
        )
        total = f"{self.graph.rows} rows; all ranks read {size_text(self.graph.bytes)} at most."
        self.small(MARGIN, low, f"{total} Sizes are those of the longest prompts and responses.")

    def levels(self) -> None:
        """The number of every level, and a band below every other one."""
        width = self.left + COLUMN * len(self.x) + 8 - MARGIN
        for level, calls in groupby(self.graph.by_level, key=lambda call: call.level):
            rows = [self.y[call.number] for call in calls]
            if level % 2 == 0:
                self.shape("rect", x=MARGIN - 6, y=rows[0] - ROW / 2, width=width, height=ROW * len(rows), fill=BAND)
            self.text(MARGIN + 22, rows[0] + 4, str(level), text_anchor="end", fill=FAINT)

    def lines(self) -> None:
        """The line of every field down to its last reader."""
        end: dict[tuple[int, str], float] = {}
        for edge in self.graph.edges:
            for field in ((edge.producer, moved.added_as) for moved in edge.fields):
                end[field] = max(end.get(field, 0.0), self.y[edge.consumer])
        for field, y in end.items():
            colour = self.colour(self.graph.calls[field[0]].pool)
            self.rule(f"M{self.x[field]} {self.y[field[0]]}V{y}", colour, stroke_width=1.6)

    def call(self, call: Call) -> None:
        """The box of a call, and its dots and rings, which a thin line ties to it."""
        y, colour, width = self.y[call.number], self.colour(call.pool), self.lane - 16
        left = MARGIN + LEVEL + self.lane * self.pools.index(call.pool) + 8
        dots = [
            (
                self.x[edge.producer, moved.added_as],
                WHITE,
                f"reads {moved.name}: {edge.spread}, {size_text(moved.bytes)}",
            )
            for edge in self.graph.edges
            if edge.consumer == call.number
            for moved in edge.fields
        ]
        dots += [
            (self.x[call.number, name], colour, f"adds {name}: {size_text(size)}") for name, size in call.adds.items()
        ]
        if dots:
            self.rule(f"M{left + width} {y}H{max(x for x, *_ in dots)}", colour, stroke_opacity=0.35)
        place = {"x": left, "y": y - BOX / 2, "width": width, "height": BOX, "rx": 5}
        self.shape("rect", **place, fill=WHITE, stroke=colour, stroke_width=1.4)
        self.text(left + width / 2, y + 4, call.label, text_anchor="middle")
        for x, fill, what in dots:
            style = {"r": 4.2, "fill": fill, "stroke": colour, "stroke_width": 1.8}
            self.shape("circle", f"{call.label} {what} at most", cx=x, cy=y, **style)
