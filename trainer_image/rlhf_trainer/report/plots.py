"""Small plots as inline SVG; colours are the page's CSS variables, so a plot follows light and dark."""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, Locator, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from rlhf_planning.numbers import ticks
from rlhf_planning.timeline import marks_of
from rlhf_trainer.report.bars import BAR_HEIGHT, PLAIN, STYLES, Bar, draw_bars, svg_of

POINTS = 200
"""Most points of a plot; with more steps a point is the mean of several steps, with their range as a band."""
LOG_ABOVE = 20.0
"""Ratio of the largest to the median value from which a positive series is drawn on a logarithmic axis."""

STYLE = PLAIN | STYLES["plot"]
INK, GRID, BEFORE = STYLE["xtick.labelcolor"], STYLE["grid.color"], "#0000f3"
SERIES = tuple(f"#0000d{number}" for number in range(10))
VARIABLES = {INK: "--plot-ink", GRID: "--plot-grid", BEFORE: "--c-before"} | {
    colour: f"--c{number}" for number, colour in enumerate(SERIES)
}

LABEL_INCHES = 0.07 / 8.5
"""Width of a label's character in inches for each point of font size; the browser chooses the font."""
BELOW_INCHES = 0.2 / 8.5
"""Height of the labels below a plot in inches for each point of font size."""
TIMELINE_POINTS = 760.0
"""Minimum width in points of a step's timeline from the begin to the end of the step."""

Array = NDArray[np.float64]
Series = tuple[Sequence[int], Sequence[float]]
"""Series of a plot: steps, and the value at each step."""


class Labels(Formatter):
    """Formatter of an axis: its labels have enough digits to differ."""

    def __init__(self, unit: str = "") -> None:
        self._unit = unit

    def __call__(self, value: float, _: object = None) -> str:
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        return [label + self._unit for label in ticks(values)]


def is_log(values: Sequence[float]) -> bool:
    """Whether a series is plotted on a logarithmic axis."""
    return min(values) > 0 and max(values) > LOG_ABOVE * float(np.median(values))


def lines(name: str, series: Mapping[int, Series]) -> Markup:
    """Draw series of values against the step; `series`: index of a colour -> series."""
    together = [value for _, values in series.values() for value in values]
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure, axes = _figure(3.1, 1.45)
        if is_log(together):
            axes.set_yscale("log")
        for colour, (steps, values) in series.items():
            x, y = _thinned(steps, np.mean), _thinned(values, np.mean)
            if len(steps) > POINTS:
                low, high = _thinned(values, np.min), _thinned(values, np.max)
                axes.fill_between(x, low, high, color=SERIES[colour], alpha=0.22, linewidth=0)
            axes.plot(x, y, color=SERIES[colour], marker="o" if len(x) <= 12 else "", markersize=3)
        _mark(axes.yaxis, LogLocator(subs=(1.0, 3.0), numticks=6) if is_log(together) else MaxNLocator(4))
        axes.yaxis.set_minor_formatter(NullFormatter())
        _mark(axes.xaxis, MaxNLocator(5, integer=True))
        return _svg(figure)


def stack(name: str, steps: Sequence[int], series: Mapping[int, Sequence[float]]) -> Markup:
    """Draw series as stacked areas against the step, the first at the bottom; `series`: colour's index -> values."""
    x, rows = _thinned(steps, np.mean), [_thinned(row, np.mean) for row in series.values()]
    if len(x) == 1:  # an area needs a width
        x, rows = np.array([x[0] - 0.5, x[0] + 0.5]), [np.repeat(row, 2) for row in rows]
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure, axes = _figure(6.2, 1.9)
        axes.stackplot(x, rows, colors=[SERIES[number] for number in series], linewidth=0)
        axes.set_xlim(x[0], x[-1])
        _mark(axes.yaxis, MaxNLocator(4), unit=" s")
        _mark(axes.xaxis, MaxNLocator(5, integer=True))
        return _svg(figure)


def distributions(name: str, before: Sequence[float], after: Sequence[float]) -> Markup:
    """Draw the distribution of a score over the held-out prompts before (grey) and after training."""
    edges = np.histogram_bin_edges([*before, *after], bins=24)
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure, axes = _figure(3.1, 1.45)
        axes.hist(before, bins=list(edges), color=BEFORE, alpha=0.55)
        axes.hist(after, bins=list(edges), color=SERIES[0], alpha=0.6)
        _mark(axes.yaxis, MaxNLocator(3, integer=True))
        _mark(axes.xaxis, MaxNLocator(6))
        return _svg(figure)


def timeline(name: str, rows: Sequence[tuple[str, Sequence[Bar]]], seconds: float) -> Markup:
    """Draw bars over the time of a step: a grey row for each rank, with the rank's name at the left end."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": name, "font.size": 11}):
        figure, axes = _figure(13.3, 0.36 * len(rows) + 0.3)
        axes.set(xlim=(0, seconds), ylim=(len(rows) - 0.5, -0.5))
        axes.grid(visible=False)
        axes.spines.bottom.set_visible(False)
        axes.set_yticks(range(len(rows)), [label for label, _ in rows])
        axes.set_xticks(*zip(*marks_of(seconds, most=9), strict=True))
        axes.barh(range(len(rows)), seconds, BAR_HEIGHT, color=GRID)
        hovers: dict[str, str] = {}
        for row, (_, bars) in enumerate(rows):
            hovers |= draw_bars(axes, row, bars, width=TIMELINE_POINTS)
        return _svg(figure, hovers)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return the figure and axes of an empty plot; width and height in inches."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.patch.set_visible(False)
    axes.margins(x=0.02)
    return figure, axes


def _mark(axis: Axis, ticks: Locator, *, unit: str = "") -> None:
    axis.set_major_locator(ticks)
    axis.set_major_formatter(Labels(unit))


def _thinned(values: Sequence[float], reduce: Callable[[Array], Any]) -> Array:
    parts = np.array_split(np.asarray(values, dtype=float), min(len(values), POINTS))
    return np.asarray([reduce(part) for part in parts])


def _svg(figure: Figure, hovers: Mapping[str, str] = MappingProxyType({})) -> Markup:
    """Return the figure as SVG for HTML, without metadata, fonts and needless digits; the frames of plots line up."""
    (axes,), (width, height) = figure.axes, figure.get_size_inches()
    low, high = sorted(axes.get_ylim())
    inside = [value for value in axes.get_yticks() if low <= value <= high] or [low]
    longest = max(len(label) for label in axes.yaxis.get_major_formatter().format_ticks(inside))
    left = max(0.5, 0.1 + LABEL_INCHES * mpl.rcParams["font.size"] * longest) / width
    right, bottom, top = 1 - 0.18 / width, BELOW_INCHES * mpl.rcParams["font.size"] / height, 1 - 0.08 / height
    axes.set_position((left, bottom, right - left, top - bottom))
    text = svg_of(figure, hovers, transparent=True)
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', text)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+(?=[ \"])", r"\1", tag[0]), text)  # coordinates
    text = re.sub(r" font-family: [^;\"]*;| transform=\"rotate\(-0 [^\"]*\"", "", text)
    text = re.sub(r"\s*\n\s*", " ", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return Markup(text)  # safe: matplotlib and svg_of escape texts
