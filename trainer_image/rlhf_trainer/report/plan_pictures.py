"""Pictures of a plan (the timeline of a step, the graph of its calls), and of the answer of `rlhf size`."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator

from rlhf_mapper.mapping import PHASES
from rlhf_planning.numbers import size_text
from rlhf_planning.sizing import Sizing
from rlhf_planning.step_graph import Graph
from rlhf_planning.timeline import Timeline, marks_of, plain, seconds_text
from rlhf_trainer.report.bars import PLAIN, STYLES, WHITE, Bar, draw_bars, svg_of

INCH = 72
STYLE, PHASE_COLOURS = PLAIN | STYLES["plan"], STYLES["phases"]
INK, FAINT, BAND, RULE = (STYLE[each] for each in ("text.color", "xtick.labelcolor", "axes.facecolor", "hatch.color"))
POOL_COLOURS = ("#2f6fb3", "#b3562f", "#3f8a52", "#8a4fa3", "#8a7a1f", "#4a8a8a", "#b03a5b", "#5a5a5a")

WIDTH = 960
"""Width of the timeline's picture in points."""
ROW, HEAD, LINE = 28, 150, 16
"""Heights in points of a row of the timeline, of all that stands around the rows, and of a line of small text."""
MAX_NAME, MAX_TITLE, MAX_MARKS = 24, 100, 9
"""Most letters of a pool's name, most letters of a title, and most ticks of the time axis."""
CALL, COLUMN, SLANT = 34, 21, 55
"""Points of a call's row and of a field's column in the graph; degrees by which names of fields are turned."""
SIZE_INCHES = (8.4, 5.2)
GRAPH_WIDTH, GRAPH_HEAD = 480, 320
"""Width and height in points of all that stands around the rows and columns of the graph."""


def timeline_svg(timeline: Timeline, *, title: str) -> str:
    """Draw a step: a band for each pool, with a row for each model and a bar for each phase; waiting is hatched."""
    with mpl.rc_context(STYLE):
        return svg_of(*timeline_figure(timeline, title=title))


def timeline_figure(timeline: Timeline, *, title: str) -> tuple[Figure, dict[str, str]]:
    """Return the figure of a step with a plot for each pool, and the hover text of each bar by the bar's id."""
    pools = {pool: [model for _, model in rows] for pool, rows in groupby(timeline.rows, key=lambda row: row[0])}
    size = (WIDTH / INCH, (HEAD + ROW * len(timeline.rows) + LINE * len(pools)) / INCH)
    figure = Figure(figsize=size)
    figure.set_layout_engine("constrained", w_pad=0.16, h_pad=0.04)
    figure.suptitle(_cut(title, MAX_TITLE), x=0.012, ha="left", weight="bold", fontsize="large")
    shares = [len(models) for models in pools.values()]
    (*plots,) = figure.subplots(len(pools), squeeze=False, sharex=True, height_ratios=shares)[:, 0]
    for axes, (pool, models) in zip(plots, pools.items(), strict=True):
        axes.set(ylim=(len(models) - 0.5, -0.5), xlim=(0, timeline.seconds or 1))
        axes.set_yticks(range(len(models)), models)
        axes.set_ylabel(_cut(pool, MAX_NAME), rotation=0, ha="right", va="center", weight="bold")
        for start, end in timeline.idle(pool):
            axes.axvspan(start, end, facecolor="none", edgecolor=RULE, hatch="//", linewidth=0)
        for begin, _ in timeline.stages.values():
            axes.axvline(begin, color=RULE, linestyle=(0, (4, 3)), linewidth=1)
        axes.tick_params(bottom=axes is plots[-1])
    figure.align_ylabels(plots)
    plots[-1].set_xticks(*zip(*marks_of(timeline.seconds, most=MAX_MARKS), strict=True), fontsize="small")
    keys = _keys_of(timeline, pools)
    figure.legend(handles=keys, loc="outside lower left", ncols=5, frameon=False, fontsize="small", handlelength=1.2)
    stages = (f"{stage} {seconds_text(end - start)}" for stage, (start, end) in timeline.stages.items())
    caption = f"predicted: a step of {seconds_text(timeline.seconds)}{timeline.ahead}: {', '.join(stages)}"
    plots[0].set_title(caption, loc="left", color=FAINT, fontsize="medium")
    figure.draw_without_rendering()
    width = plots[0].get_window_extent().width * INCH / figure.dpi
    hovers: dict[str, str] = {}
    for axes, (pool, models) in zip(plots, pools.items(), strict=True):
        for row, model in enumerate(models):
            bars = []
            for bar in timeline.of(pool, model):
                took, colour = seconds_text(bar.end - bar.start), PHASE_COLOURS[bar.phase]
                hover = f"{bar.model} {bar.phase}: {took}"
                bars.append(Bar(start=bar.start, end=bar.end, colour=colour, labels=(took,), hover=hover))
            hovers |= draw_bars(axes, row, bars, width=width, beside=True)
    return figure, hovers


def _keys_of(timeline: Timeline, pools: Iterable[str]) -> list[Patch]:
    """Return the keys of the legend: each phase that is drawn, and the hatching if a pool waits."""
    phases = {bar.phase for bar in timeline.bars}
    keys = [Patch(color=PHASE_COLOURS[phase], label=phase) for phase in PHASES if phase in phases]
    if any(timeline.idle(pool) for pool in pools):
        keys.append(Patch(facecolor=WHITE, edgecolor=RULE, hatch="///", linewidth=0, label="the pool waits"))
    return keys


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def graph_svg(graph: Graph, *, title: str, pools: Sequence[str]) -> str:
    """Draw the calls of a step as rows, ordered by level, in the colours of their pools.

    A field is a vertical line from the row of its producer to the rows of its consumers.
    """
    with mpl.rc_context(STYLE):
        colours = {pool: POOL_COLOURS[place % len(POOL_COLOURS)] for place, pool in enumerate(pools)}
        rows = {call.number: row for row, call in enumerate(graph.by_level)}
        fields = [(call.number, name) for call in graph.calls for name in call.adds]
        size = ((GRAPH_WIDTH + COLUMN * len(fields)) / INCH, (GRAPH_HEAD + CALL * len(rows)) / INCH)
        figure = Figure(figsize=size)
        figure.set_layout_engine("constrained", w_pad=0.16, h_pad=0.1)
        name, _, where = title.partition(". ")
        figure.suptitle(f"{_cut(name, MAX_TITLE)}\n{where}", x=0.012, ha="left")
        axes = figure.subplots()
        axes.set(xlim=(-1, len(fields)), ylim=(len(rows) - 0.5, -0.5), facecolor="none")
        sizes = [f"{name}  {size_text(graph.calls[number].adds[name])}" for number, name in fields]
        axes.set_xticks(range(len(fields)), sizes, rotation=SLANT, ha="left", rotation_mode="anchor", fontsize="small")
        axes.tick_params(top=False, bottom=False, labeltop=True, labelbottom=False, labelcolor=INK)
        axes.set_yticks(range(len(rows)), [f"{call.label}   level {call.level}" for call in graph.by_level])
        for call, label in zip(graph.by_level, axes.get_yticklabels(), strict=True):
            label.set_color(colours[call.pool])
            if call.level % 2 == 0:
                axes.axhspan(rows[call.number] - 0.5, rows[call.number] + 0.5, color=BAND, linewidth=0)
        figure.legend(
            handles=[Patch(color=colour, label=f"pool {pool}") for pool, colour in colours.items()],
            title=(
                "Full dot: the call adds the field. Ring: it reads it. A call waits for calls of lower levels only.\n"
                f"{graph.rows} rows; all ranks read {size_text(graph.bytes)} at most. "
                "Sizes are those of the longest prompts and responses."
            ),
            loc="outside lower left",
            ncols=len(colours),
            frameon=False,
            alignment="left",
        )
        return svg_of(figure, _draw_fields(axes, graph, rows, fields, colours))


def _draw_fields(
    axes: Axes, graph: Graph, rows: Mapping[int, int], fields: Sequence[tuple[int, str]], colours: Mapping[str, str]
) -> dict[str, str]:
    """Draw a line for each field, with a dot at the call that adds the field and rings at the calls that read it.

    fields: (number of the adding call, name). Returns the hover text of each dot and ring by its id.
    """
    dots = [(each, each[0], f"adds {each[1]}: {size_text(graph.calls[each[0]].adds[each[1]])}") for each in fields]
    dots += [
        ((edge.producer, moved.added_as), edge.consumer, f"reads {moved.name}: {edge.spread}, {size_text(moved.bytes)}")
        for edge in graph.edges
        for moved in edge.fields
    ]
    hovers = {}
    for call in graph.calls:
        last = max((fields.index(field) for field, number, _ in dots if number == call.number), default=-1)
        axes.hlines(rows[call.number], -1, last, colours[call.pool], linewidth=0.8, alpha=0.4)
    for place, (field, number, what) in enumerate(dots):
        x, row, colour = fields.index(field), rows[number], colours[graph.calls[number].pool]
        fill = colour if number == field[0] else WHITE
        axes.vlines(x, rows[field[0]], row, colours[graph.calls[field[0]].pool], linewidth=1.6)
        axes.plot(x, row, "o", markersize=8, color=colour, markerfacecolor=fill, gid=f"dot-{place}", zorder=3)
        hovers[f"dot-{place}"] = f"{graph.calls[number].label} {what} at most"
    return hovers


def size_figure(sizing: Sizing, title: str, picture: Path) -> None:
    """Draw the rows with a price into an SVG or PNG file."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES)
        figure.set_layout_engine("constrained")
        figure.suptitle(textwrap.fill(title, MAX_TITLE), x=0.012, ha="left", fontsize="small")
        axes = figure.subplots()
        axes.set(xscale="log", yscale="log", xlabel="USD for the job", ylabel="hours for the job")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
            axis.set_minor_locator(LogLocator(subs=()))
            axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
        axes.grid(visible=True, linewidth=0.5, alpha=0.5)
        rows = [row for row in sizing.rows if row.cost() is not None]
        for number, gpu in enumerate(dict.fromkeys(row.gpu for row in rows)):
            own = sorted((row for row in rows if row.gpu == gpu), key=lambda row: row.gpus)
            low, hours, high = zip(*(row.hours for row in own), strict=True)
            below, above = ([abs(a - b) for a, b in zip(hours, end, strict=True)] for end in (low, high))
            money, colour = [row.money for row in own], POOL_COLOURS[number % len(POOL_COLOURS)]
            axes.errorbar(money, hours, yerr=(below, above), fmt="o-", color=colour, label=gpu, capsize=3, linewidth=1)
            for row in own:
                look: dict[str, Any] = {"color": colour, "weight": "bold" if row is sizing.chosen else "normal"}
                axes.annotate(str(row.gpus), (row.money, row.hours[1]), (6, 5), textcoords="offset points", **look)
        axes.margins(x=0.08)
        axes.legend(title="number of GPUs of type", frameon=False)
        if picture.suffix == ".png":
            figure.savefig(picture, dpi=150)
        else:
            picture.write_text(svg_of(figure, {}))
