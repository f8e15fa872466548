"""Bars of work over the time of a step, drawn by matplotlib: for the page of a run and for the picture of a plan."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlhf_api.tables import read_table

LETTER = 6.4
"""Width of a letter of the small text, in points, rounded up; the browser chooses the font."""
BAR_HEIGHT, LEAST_WIDTH = 0.72, 1.0
"""Share of a row's height that a bar fills, and minimum width of a bar in points."""
WHITE = "#ffffff"
STYLES = read_table(__package__, "styles.yaml", dict[str, dict[str, Any]])
"""Matplotlib's settings of every picture, further ones of plots and of plans, and colours of phases."""
PLAIN: dict[Any, Any] = STYLES["plain"]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Bar for some work in the picture of a step; start and end in seconds after the begin of the step."""

    start: float
    end: float
    colour: str
    labels: Sequence[str]
    """Texts for the bar, the longest first; the first one that fits is shown."""
    hover: str


def draw_bars(axes: Axes, row: int, bars: Sequence[Bar], *, width: float, beside: bool = False) -> dict[str, str]:
    """Draw the bars of a row and return their hover texts by id; `width`: points from the begin to the end of the step.

    beside: a label that does not fit into its bar stands right of it, if there is room before the next bar.
    """
    hovers, end_of_axis = {}, axes.get_xlim()[1]
    scale = width / end_of_axis
    for place, bar in enumerate(bars):
        drawn = max(bar.end - bar.start, LEAST_WIDTH / scale)
        (patch,) = axes.barh(row, drawn, BAR_HEIGHT, bar.start, color=bar.colour, linewidth=0, zorder=3)
        name = f"bar-{id(axes)}-{row}-{place}"
        patch.set_gid(name)
        hovers[name] = bar.hover
        following = bars[place + 1].start if place + 1 < len(bars) else end_of_axis
        fitting = [text for text in bar.labels if _room(text) <= (bar.end - bar.start) * scale]
        look: dict[str, Any] = {"va": "center_baseline", "fontsize": "small", "zorder": 4}
        if fitting:
            axes.text((bar.start + bar.end) / 2, row, fitting[0], ha="center", color=WHITE, **look)
        elif beside and _room(bar.labels[-1]) <= (following - bar.end) * scale:
            axes.text(bar.end + 4 / scale, row, bar.labels[-1], **look)
    return hovers


def svg_of(figure: Figure, hovers: Mapping[str, str], *, transparent: bool = False) -> str:
    """Return a figure as SVG without metadata; hovers: id of a drawn part -> text that a browser shows over it."""
    buffer = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=transparent, metadata=metadata)
    text = buffer.getvalue()
    for name, hover in hovers.items():
        text = text.replace(f'<g id="{name}">', f"<g>\n    <title>{escape(hover)}</title>")
    return text[text.index("<svg") :]


def _room(text: str) -> float:
    return len(text) * LETTER + 8
