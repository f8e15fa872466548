"""The timeline of a step as SVG: a band a pool, in it a row a model, and a bar a phase; pools that wait are hatched."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby

from rlhf_mapper.mapping import PHASES, Phase
from rlhf_planning.timeline import Bar, Timeline, marks_of, seconds_text

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
COLOURS: dict[Phase, str] = {
    "reshard": "#b8860b",
    "generation": "#2f6fb3",
    "scoring": "#8a4fa3",
    "update": "#3f8a52",
}
INK, FAINT, BAND, RULE = "#24292f", "#6e7781", "#f3f5f8", "#b8c0c8"
WIDTH, MARGIN, TITLE = 960, 16, 56
"""Of the picture; around it; height of the title."""
ROW, BOX, GAP, LINE = 28, 20, 10, 15
"""Heights of a row, of its bar, between pools, and of a line of small text."""
BIG, LETTER, SMALL = 9.5, 7.0, 6.2
"""Width of a letter of 15, 12 and 11 pixels, rounded up."""
NAME = 24
"""Letters of a pool's name; a longer one is cut."""
MARKS, LEAST = 9, 1.0
"""Marks of the time axis at most; width of a bar at least."""
HALO = {"paint_order": "stroke", "stroke": BAND, "stroke_width": 4}
"""Of a text that may stand on lines."""
HATCH = (
    '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<path d="M0 0V6" stroke="{RULE}" stroke-width="1.6"/></pattern></defs>'
)


class Drawing:
    """Where everything is, and the shapes drawn so far."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.shapes: list[str] = []
        self.pools = {
            pool: [model for _, model in rows] for pool, rows in groupby(timeline.rows, key=lambda row: row[0])
        }
        models = max(len(model) for _, model in timeline.rows)
        self.model_x = MARGIN + 8 + max(len(cut(pool)) for pool in self.pools) * LETTER + 14
        self.left = self.model_x + models * LETTER + 12
        self.right = WIDTH - MARGIN - 8.0
        """Where the step begins and ends."""
        self.labels = list(self._stage_labels())
        top = TITLE + LINE * (1 + max((line for *_, line in self.labels), default=0)) + 8
        self.tops: dict[str, float] = {}
        y = float(top)
        for pool, names in self.pools.items():
            self.tops[pool] = y
            y += ROW * len(names) + GAP
        self.bottom = y - GAP
        self.height = self.bottom + 64

    def x(self, seconds: float) -> float:
        """The place of a time."""
        return self.left + (self.right - self.left) * (seconds / self.timeline.seconds if seconds else 0.0)

    def _stage_labels(self) -> Iterator[tuple[float, float, str, int]]:
        """Left end, begin of its stage, text and line of each label; on the first line where it does not overlap."""
        ends: list[float] = []
        for stage, (start, end) in self.timeline.stages.items():
            text = f"{stage} {seconds_text(end - start)}"
            width = len(text) * SMALL + 12
            x = min(self.x(start), self.right - width)
            line = next((line for line, taken in enumerate(ends) if taken <= x), len(ends))
            ends[line : line + 1] = [x + width]
            yield x, self.x(start), text, line

    def text(self, x: float, y: float, content: str, **style: object) -> None:
        """Add a text; underscores of a style's name stand for hyphens."""
        attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(content)}</text>')

    def rule(self, x: float, top: float, bottom: float, *, dashes: str = "none") -> None:
        """Add a vertical line."""
        line = f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}" stroke="{RULE}" stroke-dasharray="{dashes}"/>'
        self.shapes.append(line)

    def box(self, kind: str, place: tuple[float, float, float, float], fill: str, what: str = "") -> None:
        """Add a rectangle at (x, y, width, height) that says `what` it is when it is pointed at."""
        x, y, width, height = place
        size = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
        said = f"<title>{escape(what)}</title>" if what else ""
        self.shapes.append(f'<rect class="{kind}" {size} fill="{fill}">{said}</rect>')


def svg_of(timeline: Timeline, *, title: str) -> str:
    """The drawing."""
    drawing = Drawing(timeline)
    letters = int((WIDTH - 2 * MARGIN) / BIG)
    drawing.text(MARGIN, 24, cut(title, letters), font_size=15, font_weight=600)
    drawing.text(MARGIN, 44, f"predicted: a step of {seconds_text(timeline.seconds)}", fill=FAINT)
    for pool, y in drawing.tops.items():
        _pool(drawing, pool, y)
    _stages(drawing)
    for pool, y in drawing.tops.items():
        for row, model in enumerate(drawing.pools[pool]):
            drawing.text(drawing.model_x, y + ROW * (row + 0.5) + 4, model)
            _bars(drawing, timeline.of(pool, model), y + ROW * row)
    _axis(drawing)
    _legend(drawing)
    size = f'width="{WIDTH}" height="{drawing.height}" viewBox="0 0 {WIDTH} {drawing.height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="12" fill="{INK}">'
    white = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, HATCH, white, *drawing.shapes, "</svg>"]) + "\n"


def cut(text: str, letters: int = NAME) -> str:
    """The text, or its beginning."""
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _pool(drawing: Drawing, pool: str, y: float) -> None:
    """The band of a pool with its name, and when it waits."""
    height = ROW * len(drawing.pools[pool])
    drawing.box("pool", (MARGIN, y, WIDTH - 2 * MARGIN, height), BAND, pool)
    drawing.text(MARGIN + 8, y + ROW / 2 + 4, cut(pool), font_weight=600)
    for start, end in drawing.timeline.idle(pool):
        x = drawing.x(start)
        place = (x, y, drawing.x(end) - x, height)
        drawing.box("idle", place, "url(#idle)", f"{pool} waits {seconds_text(end - start)}")


def _bars(drawing: Drawing, bars: list[Bar], y: float) -> None:
    """The bars of a row; the time of each stands in it or right of it, if there is room before the next."""
    for place, bar in enumerate(bars):
        x, end = drawing.x(bar.start), drawing.x(bar.end)
        label = seconds_text(bar.end - bar.start)
        what = f"{bar.model} {bar.phase}: {label}"
        drawing.box("bar", (x, y + (ROW - BOX) / 2, max(LEAST, end - x), BOX), COLOURS[bar.phase], what)
        width = len(label) * SMALL + 8
        following = drawing.x(bars[place + 1].start) if place + 1 < len(bars) else drawing.right
        baseline = y + ROW / 2 + 4
        if end - x >= width:
            drawing.text((x + end) / 2, baseline, label, text_anchor="middle", font_size=11, fill="#ffffff")
        elif following - end >= width:
            drawing.text(end + 4, baseline, label, font_size=11, **HALO)


def _stages(drawing: Drawing) -> None:
    """The barriers between the stages, with the name and the time of each stage at its begin."""
    for x, begin, text, line in drawing.labels:
        baseline = TITLE + LINE * (line + 1)
        drawing.rule(begin, baseline - LINE + 4, drawing.bottom, dashes="4 3")
        drawing.text(x + 4, baseline, text, font_size=11, fill=FAINT)


def _axis(drawing: Drawing) -> None:
    """Marks below the bars."""
    drawing.shapes.append(
        f'<path d="M{drawing.left:.1f} {drawing.bottom + 4:.1f}H{drawing.right:.1f}" stroke="{FAINT}"/>'
    )
    for seconds, label in marks_of(drawing.timeline.seconds, most=MARKS):
        x = drawing.x(seconds)
        drawing.rule(x, drawing.bottom + 4, drawing.bottom + 9)
        anchor = "end" if x + len(label) * SMALL / 2 > WIDTH - MARGIN else "middle"
        drawing.text(x, drawing.bottom + 22, label, text_anchor=anchor, font_size=11, fill=FAINT)


def _legend(drawing: Drawing) -> None:
    """The colours that are to be seen."""
    shown: list[tuple[str, str]] = [
        (phase, COLOURS[phase]) for phase in PHASES if any(bar.phase == phase for bar in drawing.timeline.bars)
    ]
    if any(drawing.timeline.idle(pool) for pool in drawing.pools):
        shown.append(("the pool waits", "url(#idle)"))
    x, y = drawing.left, drawing.bottom + 38
    for name, fill in shown:
        drawing.box("key", (x, y, 12, 12), fill)
        drawing.text(x + 18, y + 10, name, font_size=11)
        x += 18 + len(name) * SMALL + 20
