"""Picture of the answer of `rlhf size`: hours against money, a dot for each hardware, with its interval."""

from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from rlhf_planning.sizing import Sizing
from rlhf_planning.timeline import plain
from rlhf_trainer.report.bars import PLAIN, STYLES, svg_of

STYLE = PLAIN | STYLES["plan"]
COLOURS = ("#2f6fb3", "#b3562f", "#3f8a52", "#8a4fa3", "#8a7a1f", "#4a8a8a", "#b03a5b", "#5a5a5a")
SIZE, WIDTH = (8.4, 5.2), 100
"""Size of the picture in inches, and letters of a line of the title."""


def size_figure(sizing: Sizing, title: str, picture: Path) -> None:
    """Draw the rows with a price into an SVG or PNG file."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE)
        figure.set_layout_engine("constrained")
        figure.suptitle(fill(title, WIDTH), x=0.012, ha="left", fontsize="small")
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
            money, colour = [row.money for row in own], COLOURS[number % len(COLOURS)]
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
