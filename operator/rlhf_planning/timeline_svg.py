"""The timeline of a step as SVG: a band a pool, in it a row a model, and a bar a phase; pools that wait are hatched."""

from __future__ import annotations

from itertools import groupby

from rlhf_mapper.mapping import PHASES, Phase
from rlhf_planning.svg import BAND, FAINT, MARGIN, WHITE, Picture
from rlhf_planning.timeline import Bar, Timeline, marks_of, seconds_text

COLOURS: dict[Phase, str] = {
    "reshard": "#b8860b",
    "generation": "#2f6fb3",
    "scoring": "#8a4fa3",
    "update": "#3f8a52",
}
WAITS = "url(#hatch)"
WIDTH, TITLE = 960, 56
"""Of the picture; height of the title."""
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


def svg_of(timeline: Timeline, *, title: str) -> str:
    """The picture."""
    drawing = _Drawing(timeline, cut(title, int((WIDTH - 2 * MARGIN) / BIG)))
    for pool in drawing.tops:
        drawing.pool(pool)
    drawing.stages()
    for pool, y in drawing.tops.items():
        for row, model in enumerate(drawing.pools[pool]):
            drawing.text(drawing.names, y + ROW * (row + 0.5) + 4, model)
            drawing.bars(timeline.of(pool, model), y + ROW * row)
    drawing.axis()
    drawing.legend()
    return drawing.svg(WIDTH, drawing.bottom + 64)


def cut(text: str, letters: int = NAME) -> str:
    """The text, or its beginning."""
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


class _Drawing(Picture):
    """Where everything is."""

    def __init__(self, timeline: Timeline, title: str) -> None:
        super().__init__(title, f"predicted: a step of {seconds_text(timeline.seconds)}{timeline.ahead}")
        self.timeline = timeline
        self.pools = {
            pool: [model for _, model in rows] for pool, rows in groupby(timeline.rows, key=lambda row: row[0])
        }
        self.names = MARGIN + 22 + max(len(cut(pool)) for pool in self.pools) * LETTER
        """Where the names of the models begin."""
        self.left = self.names + max(len(model) for _, model in timeline.rows) * LETTER + 12
        self.right = WIDTH - MARGIN - 8.0
        """Where the step begins and ends."""
        self.labels = self._stage_labels()
        y = TITLE + LINE * (1 + max((line for *_, line in self.labels), default=0)) + 8.0
        self.tops: dict[str, float] = {}
        for pool, models in self.pools.items():
            self.tops[pool] = y
            y += ROW * len(models) + GAP
        self.bottom = y - GAP

    def x(self, seconds: float) -> float:
        """The place of a time."""
        return self.left + (self.right - self.left) * (seconds / self.timeline.seconds if seconds else 0.0)

    def _stage_labels(self) -> list[tuple[float, float, str, int]]:
        """Left end, begin of its stage, text and line of each label; on the first line where it does not overlap."""
        labels, ends = [], list[float]()
        for stage, (start, end) in self.timeline.stages.items():
            text = f"{stage} {seconds_text(end - start)}"
            width = len(text) * SMALL + 12
            x = min(self.x(start), self.right - width)
            line = next((line for line, taken in enumerate(ends) if taken <= x), len(ends))
            ends[line : line + 1] = [x + width]
            labels.append((x, self.x(start), text, line))
        return labels

    def pool(self, pool: str) -> None:
        """The band of a pool with its name, and when it waits."""
        y, height = self.tops[pool], ROW * len(self.pools[pool])
        band = {"y": y, "height": height}
        self.shape("rect", pool, class_="pool", x=MARGIN, width=WIDTH - 2 * MARGIN, fill=BAND, **band)
        self.text(MARGIN + 8, y + ROW / 2 + 4, cut(pool), font_weight=600)
        for start, end in self.timeline.idle(pool):
            x, waits = self.x(start), f"{pool} waits {seconds_text(end - start)}"
            self.shape("rect", waits, class_="idle", x=x, width=self.x(end) - x, fill=WAITS, **band)

    def stages(self) -> None:
        """The barriers between the stages, with the name and the time of each stage at its begin."""
        for x, begin, text, line in self.labels:
            base = TITLE + LINE * (line + 1)
            self.rule(f"M{begin:.1f} {base - LINE + 4}V{self.bottom:.1f}", stroke_dasharray="4 3")
            self.small(x + 4, base, text)

    def bars(self, bars: list[Bar], y: float) -> None:
        """The bars of a row; the time of each stands in it or right of it, if there is room before the next."""
        ends = [self.x(bar.start) for bar in bars[1:]] + [self.right]
        base = y + ROW / 2 + 4
        for bar, following in zip(bars, ends, strict=True):
            x, end, label = self.x(bar.start), self.x(bar.end), seconds_text(bar.end - bar.start)
            place = {"x": x, "y": y + (ROW - BOX) / 2, "width": max(LEAST, end - x), "height": BOX}
            self.shape("rect", f"{bar.model} {bar.phase}: {label}", class_="bar", **place, fill=COLOURS[bar.phase])
            room = len(label) * SMALL + 8
            if end - x >= room:
                self.text((x + end) / 2, base, label, text_anchor="middle", font_size=11, fill=WHITE)
            elif following - end >= room:
                self.text(end + 4, base, label, font_size=11, **HALO)

    def axis(self) -> None:
        """Marks below the bars."""
        low = self.bottom + 4
        self.rule(f"M{self.left:.1f} {low:.1f}H{self.right:.1f}", FAINT)
        for seconds, label in marks_of(self.timeline.seconds, most=MARKS):
            x = self.x(seconds)
            self.rule(f"M{x:.1f} {low:.1f}V{low + 5:.1f}")
            anchor = "end" if x + len(label) * SMALL / 2 > WIDTH - MARGIN else "middle"
            self.small(x, low + 18, label, text_anchor=anchor)

    def legend(self) -> None:
        """The colours that are to be seen."""
        phases = {bar.phase for bar in self.timeline.bars}
        shown = [(str(phase), COLOURS[phase]) for phase in PHASES if phase in phases]
        shown += [("the pool waits", WAITS)] if any(map(self.timeline.idle, self.pools)) else []
        x, y = self.left, self.bottom + 38
        for name, fill in shown:
            self.shape("rect", class_="key", x=x, y=y, width=12, height=12, fill=fill)
            self.text(x + 18, y + 10, name, font_size=11)
            x += 38 + len(name) * SMALL
