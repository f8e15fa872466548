"""Draws a dashboard of Grafana from its JSON and Prometheus' answers; Grafana itself is not run here."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.processes import FailedError

Course = Callable[[str], list[dict[str, Any]]]
WIDTH, COLUMNS, ROW_HEIGHT = 15.0, 24, 0.3
"""Inches of a picture, columns of Grafana's grid, inches of a row of it."""
SIZES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))
MOST = 8
"""Series in a legend."""


def drawn(dashboard: Mapping[str, Any], course: Course, file: Path, *, start: float, end: float) -> None:
    """Write the picture; course: the series of a query from start to end, in seconds since 1970."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise FailedError("the pictures need matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    figure = plt.figure(figsize=(WIDTH, rows * ROW_HEIGHT + 0.4), dpi=80)
    top = 1 - 0.15 / figure.get_figheight()
    figure.text(0.01, top, dashboard["title"], fontsize=13, weight="bold", va="center")
    figure.text(0.99, top, "x: minutes", fontsize=8, ha="right", va="center")
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        bottom = (rows - place["y"] - place["h"]) * ROW_HEIGHT / figure.get_figheight()
        left, width = place["x"] / COLUMNS, place["w"] / COLUMNS
        height = place["h"] * ROW_HEIGHT / figure.get_figheight()
        if panel["type"] == "row":
            figure.text(0.01, bottom + height / 2, panel["title"], fontsize=11, weight="bold", va="center")
            continue
        margins = (0.045, 0.0) if panel["type"] == "timeseries" else (0.01, 0.0)
        inches = 1 / figure.get_figheight()
        box = (left + margins[0], bottom + 0.62 * inches, width - margins[0] - 0.012, height - 0.95 * inches)
        axes = figure.add_axes(box if panel["type"] == "timeseries" else (left, bottom, width, height))
        if panel["type"] == "timeseries":
            axes.set_title(panel["title"], fontsize=9, loc="left", pad=4)
            axes.set_xlim(0.0, (end - start) / 60)
        series = [named for target in panel["targets"] for named in _named(course(target["expr"]), target, start)]
        (_stat if panel["type"] == "stat" else _lines)(axes, panel, series)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)


def _named(
    found: list[dict[str, Any]], target: Mapping[str, Any], start: float
) -> list[tuple[str, list[float], list[float]]]:
    """(legend, minutes from the start on, values) of each series."""
    named = []
    for each in found:
        legend = target["legendFormat"]
        for label, value in each["metric"].items():
            legend = legend.replace(f"{{{{{label}}}}}", value)
        named.append(
            (legend, [(moment - start) / 60 for moment, _ in each["values"]], [float(v) for _, v in each["values"]])
        )
    return named


def _stat(axes: Any, panel: Mapping[str, Any], series: list[tuple[str, list[float], list[float]]]) -> None:
    axes.set_axis_off()
    axes.set_title(panel["title"], fontsize=9, loc="center", y=0.68)
    # Of a series that has ended Grafana shows the last value, too.
    newest = max(series, key=lambda each: each[1][-1], default=None)
    text = "no data"
    if newest:
        is_name = panel["options"]["textMode"] == "name"
        text = newest[0] if is_name else short(newest[2][-1], panel["fieldConfig"]["defaults"]["unit"])
    axes.text(0.5, 0.35, text, fontsize=16 if newest else 10, ha="center", va="center")


def _lines(axes: Any, panel: Mapping[str, Any], series: list[tuple[str, list[float], list[float]]]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    axes.tick_params(labelsize=7)
    axes.grid(visible=True, linewidth=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if not series:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="gray")
        return
    if defaults["custom"]["stacking"]["mode"] == "normal":
        moments = sorted({moment for _, minutes, _ in series for moment in minutes})
        by_moment = [dict(zip(minutes, values, strict=True)) for _, minutes, values in series]
        stack = [[each.get(moment, 0.0) for moment in moments] for each in by_moment]
        axes.stackplot(moments, stack, labels=[name for name, *_ in series], alpha=0.8)
    else:
        for name, minutes, values in series:
            kept = [(m, v) for m, v in zip(minutes, values, strict=True) if math.isfinite(v)]
            axes.plot([m for m, _ in kept], [v for _, v in kept], label=name, linewidth=1.2)
    values = [value for _, _, each in series for value in each if math.isfinite(value)]
    if values and min(values) == max(values):  # a constant is shown from 0 on, not in the middle of nothing
        axes.set_ylim(min(0.0, 2 * values[0]), max(0.0, 2 * values[0]) or 1.0)
    axes.yaxis.set_major_formatter(lambda value, _: short(value, defaults["unit"]))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[:MOST],
        labels[:MOST],
        fontsize=6.5,
        ncol=min(4, len(labels)),
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.13),
        frameon=False,
        borderpad=0,
        columnspacing=1,
        handlelength=1,
    )


def short(value: float, unit: str) -> str:
    """A value as a person reads it."""
    if not math.isfinite(value):
        return str(value)
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        size, name = next((each for each in TIMES if abs(value) >= 2 * each[0]), (1.0, "s"))
        return f"{value / size:.3g} {name}"
    size, prefix = next((each for each in SIZES if abs(value) >= each[0]), (1.0, ""))
    return f"{value / size:.3g} {prefix}{'B' if unit == 'bytes' else ''}".strip()
