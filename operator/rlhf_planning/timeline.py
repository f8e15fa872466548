"""Predicted timeline of a step, also as a chart: a bar for each phase of each model, between the stages' barriers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table
from rich.text import Text

from rlhf_api.names import Role
from rlhf_mapper.fused_schedule import FusedUpdates, Pass
from rlhf_mapper.mapping import PHASES, STAGE_OF, STAGES, MappedPool, Phase, Prediction, Stage
from rlhf_planning.numbers import MINUS, number, tick

STEPS = (1, 2, 2.5, 5, 10)
"""Possible distances between ticks of a time axis, to be multiplied by a power of ten."""
NEGLIGIBLE = 1e-9
"""Share of a step below which a gap between bars is rounding."""
BLOCKS: dict[Phase, tuple[str, str]] = {
    "reshard": ("░", "yellow"),
    "generation": ("▓", "blue"),
    "scoring": ("▒", "magenta"),
    "update": ("█", "green"),
}
"""Character and colour of each phase in the chart; the characters tell phases apart without colours."""
IDLE = "·"
MARK_COLUMNS, MIN_CELLS = 8, 20
"""Width in columns of a tick's label on the time axis, and of the narrowest chart."""
BUSY_COLUMNS, GAP = 5, 2
LETTERS = ("Aa", "Cc")
"""Letters of forward and backward pass in the lines of ranks, by model: actor and critic."""
MAX_RANKS = 8
"""Most ranks of a pipeline that have a line."""


@dataclass(frozen=True, kw_only=True)
class PhaseBar:
    """Time in which a model works on one phase, in seconds after the begin of the step."""

    pool: str
    model: Role
    phase: Phase
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Timeline of a step; a stage lasts as long as its slowest pool, and ends with a barrier."""

    rows: tuple[tuple[str, Role], ...]
    """(pool, model) of every row of the timeline, ordered by pool."""
    stages: dict[Stage, tuple[float, float]]
    """Begin and end in seconds of the stages with work, in order."""
    bars: tuple[PhaseBar, ...]
    ahead: str
    """Text that says that generation is for a later step, if the job generates ahead; else empty."""

    @property
    def seconds(self) -> float:
        return max([0.0, *(end for _, end in self.stages.values()), *(bar.end for bar in self.bars)])

    def of(self, pool: str, model: Role) -> list[PhaseBar]:
        """Return the bars of a row, from left to right."""
        return [bar for bar in self.bars if (bar.pool, bar.model) == (pool, model)]

    def idle(self, pool: str) -> list[tuple[float, float]]:
        """Return begin and end of the times in which no model of a pool works."""
        gaps, free_since = [], 0.0
        working = sorted((bar.start, bar.end) for bar in self.bars if bar.pool == pool)
        for start, end in [*working, (self.seconds, self.seconds)]:
            if start - free_since > NEGLIGIBLE * self.seconds:
                gaps.append((free_since, start))
            free_since = end
        return gaps

    def busy(self, pool: str) -> float:
        """Return the share of the step in which a pool works."""
        waits = sum(end - start for start, end in self.idle(pool))
        return 1 - waits / self.seconds if self.seconds else 0.0


def timeline_of(pools: Sequence[MappedPool], prediction: Prediction) -> Timeline:
    """Return the timeline of a predicted step.

    Within a stage the models of a pool run one after another, and pools at the same time. If the work of a pool is
    longer than the stage, the pool streams: its bars begin before the stage. Generation for later steps (`works_ahead`)
    is no stage of this step; its bars start where the step starts, and the rest follows the transition.
    """
    stages: dict[Stage, tuple[float, float]] = {}
    begin = 0.0
    for stage in STAGES:
        if length := prediction.stages.get(stage, 0.0):
            stages[stage] = (begin, begin + length)
            is_ahead = prediction.works_ahead and stage == "generation"
            begin = prediction.phases.get("reshard", 0.0) if is_ahead else begin + length
    bars = [
        bar
        for stage, (start, _) in stages.items()
        for pool in pools
        for bar in _in_turn(pool, prediction, stage, start)
    ]
    if prediction.works_ahead:
        del stages["generation"]
    rows = tuple((pool.name, model) for pool in pools for model in pool.models)
    ahead = "; generation is of a later step" if prediction.works_ahead else ""
    return Timeline(rows=rows, stages=stages, bars=tuple(bars), ahead=ahead)


def _in_turn(pool: MappedPool, prediction: Prediction, stage: Stage, start: float) -> Iterator[PhaseBar]:
    """Yield the bars of a pool in a stage. If together they exceed the stage, they begin earlier and end with it."""
    phases = [phase for phase in PHASES if STAGE_OF[phase] == stage]
    whole = sum(prediction.models[model].seconds.get(phase, 0.0) for model in pool.models for phase in phases)
    start += min(0.0, prediction.stages.get(stage, 0.0) * (1 + NEGLIGIBLE) - whole)
    for model in pool.models:
        for phase in phases:
            seconds = prediction.models[model].seconds.get(phase, 0.0)
            if seconds > 0:
                yield PhaseBar(pool=pool.name, model=model, phase=phase, start=start, end=start + seconds)
                start += seconds


def seconds_text(seconds: float) -> str:
    """Return a duration with three digits: 84 ms, 1.53 s, 41.2 s, 1,234 s."""
    return f"{plain(seconds)} s" if seconds >= 1 else f"{plain(1000 * seconds)} ms"


def interval_text(seconds: float, low: float, high: float) -> str:
    """Return a predicted duration with its interval: 74 s (55 to 95), 840 ms (620 to 1,090)."""
    scale = 1 if seconds >= 1 else 1000
    return f"{seconds_text(seconds)} ({plain(low * scale)} to {plain(high * scale)})"


def plain(value: float) -> str:
    """Format a number with an ASCII minus, which every terminal can show."""
    return number(value).replace(MINUS, "-")


def marks_of(seconds: float, *, most: int) -> list[tuple[float, str]]:
    """Return (seconds, label in s or ms) of each tick of a time axis: at most `most` ticks, the first of them at 0."""
    if seconds <= 0:
        return [(0.0, "0 s")]
    scale, unit = (1.0, "s") if seconds >= 1 else (1000.0, "ms")
    least = seconds * scale / (most - 1)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(step * power for step in STEPS if step * power >= least * (1 - NEGLIGIBLE))
    count = math.floor(seconds * scale / step * (1 + NEGLIGIBLE))
    return [(place * step / scale, f"{tick(place * step)} {unit}") for place in range(count + 1)]


def chart_of(timeline: Timeline, *, columns: int) -> Table:
    """Return the timeline as a table with the stages above, a row a model, and the time axis below."""
    names = min(16, max(map(len, ("pool", *(pool for pool, _ in timeline.rows)))))  # a longer name is cut
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
    axis = ""
    for seconds, label in marks_of(timeline.seconds, most=max(2, cells // MARK_COLUMNS)):
        cell = round(seconds / timeline.seconds * cells) if timeline.seconds else 0
        if cell + len(label) <= cells and cell >= len(axis):
            axis = axis.ljust(cell) + label
    table.add_row("", "", Text(axis, style="dim"), "")
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


def schedule_lines(updates: FusedUpdates, *, columns: int) -> Iterator[str]:
    """Yield a line for each rank without and with fusion, on one scale of time, and the meaning of the letters."""
    whole = updates.alone.seconds
    for name, schedule in (("one after the other", updates.alone), ("fused", updates.schedule)):
        yield f"  {name}: {seconds_text(schedule.seconds)}"
        for rank, passes in enumerate(schedule.ranks[:MAX_RANKS]):
            head = f"    rank {rank}  "
            yield head + _schedule_line(passes, (columns - len(head)) / whole)
    yield f"  A, C: forward passes of actor and critic; a, c: backward passes; {IDLE}: the rank waits"


def _schedule_line(passes: Sequence[Pass], cells_of_a_second: float) -> str:
    cells: list[str] = []
    for each in passes:
        start, end = (round(second * cells_of_a_second) for second in (each.start, each.end))
        cells += [IDLE] * (start - len(cells)) + [LETTERS[each.model][each.is_backward]] * (end - start)
    return "".join(cells)
