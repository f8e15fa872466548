"""Timeline of a step for a terminal: a row of block characters for each model; phases differ even without colours."""

from __future__ import annotations

from itertools import groupby

from rich.table import Table
from rich.text import Text

from rlhf_api.names import Role
from rlhf_mapper.mapping import PHASES, Phase
from rlhf_planning.timeline import Timeline, marks_of, seconds_text

BLOCKS: dict[Phase, tuple[str, str]] = {
    "reshard": ("░", "yellow"),
    "generation": ("▓", "blue"),
    "scoring": ("▒", "magenta"),
    "update": ("█", "green"),
}
"""Character and colour of each phase in the chart."""
IDLE = "·"
MARK_COLUMNS, MIN_CELLS = 8, 20
"""Width in columns of a mark of the time axis, and of the narrowest chart."""
NAME_COLUMNS = 16
"""Width in columns of a pool's name; a longer name is cut."""
BUSY_COLUMNS, GAP = 5, 2


def chart_of(timeline: Timeline, *, columns: int) -> Table:
    """Return the timeline as a table with the stages above, a row a model, and the time axis below."""
    names = min(NAME_COLUMNS, max(map(len, ("pool", *(pool for pool, _ in timeline.rows)))))
    models = max(len(model) for _, model in timeline.rows)
    cells = max(MIN_CELLS, columns - names - models - BUSY_COLUMNS - 3 * GAP)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="", highlight=False)
    table.add_column("pool", no_wrap=True, overflow="ellipsis", max_width=names)
    table.add_column("model", no_wrap=True)
    table.add_column(_stages(timeline, cells), no_wrap=True, min_width=cells, max_width=cells)
    table.add_column("busy", no_wrap=True, justify="right", min_width=BUSY_COLUMNS)
    for pool, rows in groupby(timeline.rows, key=lambda row: row[0]):
        name, busy = pool, f"{timeline.busy(pool):.0%}"
        for _, model in rows:
            table.add_row(Text(name), model, _row(timeline, pool, model, cells), busy)
            name, busy = "", ""
    table.add_row("", "", _axis(timeline, cells), "")
    return table


def legend_of(timeline: Timeline) -> Text:
    """Return the meanings of the characters in the chart."""
    text = Text()
    for phase in PHASES:
        if any(bar.phase == phase for bar in timeline.bars):
            text.append(BLOCKS[phase][0], style=BLOCKS[phase][1]).append(f" {phase}   ")
    if any(timeline.idle(pool) for pool, _ in timeline.rows):
        text.append(f"{IDLE} the pool waits")
    return text


def _row(timeline: Timeline, pool: str, model: Role, cells: int) -> Text:
    """Return the chart's row of a model: its bars, of which the shortest are drawn last and stay visible."""
    row = [(" ", "")] * cells
    for start, end in timeline.idle(pool):
        for cell in _covered(start, end, timeline.seconds, cells):
            row[cell] = (IDLE, "dim")
    for bar in sorted(timeline.of(pool, model), key=lambda bar: bar.start - bar.end):
        for cell in _covered(bar.start, bar.end, timeline.seconds, cells):
            row[cell] = BLOCKS[bar.phase]
    return Text.assemble(*row)


def _covered(start: float, end: float, seconds: float, cells: int) -> range:
    """Return the cells of a row that a span of time covers, at least one."""
    first = min(round(start / seconds * cells), cells - 1)
    return range(first, max(first + 1, round(end / seconds * cells)))


def _stages(timeline: Timeline, cells: int) -> Text:
    """Return the chart's head line: a bracket for each stage, with the stage's name and time if there is room."""
    line = [" "] * cells
    for stage, (start, end) in timeline.stages.items():
        covered = _covered(start, end, timeline.seconds, cells)
        labels = (f" {stage} {seconds_text(end - start)} ", f" {stage} ", "")
        label = next(label for label in labels if len(label) <= max(0, len(covered) - 2))
        bracket = f"├{label.center(len(covered) - 2, '─')}┤" if len(covered) > 1 else "│"
        line[covered.start : covered.stop] = bracket
    return Text("".join(line))


def _axis(timeline: Timeline, cells: int) -> Text:
    """Return the labels of the time axis, each beginning at its cell."""
    line = ""
    for seconds, label in marks_of(timeline.seconds, most=max(2, cells // MARK_COLUMNS)):
        cell = round(seconds / timeline.seconds * cells) if timeline.seconds else 0
        if cell + len(label) <= cells and cell >= len(line):
            line = line.ljust(cell) + label
    return Text(line, style="dim")
