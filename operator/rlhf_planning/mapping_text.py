"""Text of a mapping and of the reasons for it, for 60 columns or more, with colours or without."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import wrap
from typing import Any

import typer
from rich.console import Console, ConsoleOptions
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlhf_api.names import Role
from rlhf_mapper.hardware import ESTIMATED
from rlhf_mapper.mapping import PHASES, STAGES, DeviceMapping, Infeasible, Prediction, Rejected, Stage
from rlhf_mapper.prediction import differ
from rlhf_planning.timeline import chart_of, interval_text, legend_of, plain, schedule_lines, seconds_text, timeline_of

PARTS = {
    "weights": "weights",
    "gradients": "gradi-\nents",
    "optimizer": "opti-\nmizer",
    "activations": "activa-\ntions",
    "generator": "gene-\nrator",
    "kv_cache": "KV\ncache",
}
"""Column heading of each part of a GPU's memory."""
TIMES = "\N{MULTIPLICATION SIGN}"
UNIT = re.compile(r"(?<=\d) (?=(ms|s|kB|MB|GB|M)\b)")
NO_BREAK = "\N{NO-BREAK SPACE}"
UNITS = ((9, "GB"), (6, "MB"), (3, "kB"))
"""Units of memory: power of ten and name, the largest first."""
STAGE_COLUMNS, NUMBER_COLUMNS, MEMORY_COLUMNS = 11, 5, 64
"""Width in columns of a stage's name, of a number of bytes, and of a memory table without its bar."""
NARROW = 78
"""Terminal width in columns below which memory tables have no bars, and the table of models is cut in two."""
COLUMNS = 100
"""Width in columns of a plan that is printed where stdout is no terminal."""
WIDE = 88
"""Terminal width in columns from which on two blank columns lie between two columns of a table."""


@contextmanager
def printing() -> Iterator[Console]:
    """Print the output of the yielded console without trailing spaces; it is COLUMNS wide if stdout is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = COLUMNS
    with console.capture() as shown:
        yield console
    typer.echo(re.sub(r" +$", "", shown.get(), flags=re.MULTILINE), nl=False)


def explain(
    mapping: DeviceMapping | Infeasible,
    *,
    title: str,
    console: Console,
    prices: Mapping[str, float] | None = None,
    notes: Iterable[str] = (),
) -> None:
    """Print the pool of each model, the predicted step and the rejected placements; or why nothing fits.

    prices: price of a GPU for an hour by type; if empty, no price of a step is printed. notes: sentences to print.
    """
    console.print(Prose(title, "bold"))
    if isinstance(mapping, Infeasible):
        _infeasible(console, mapping)
        return
    _print_head(console, "pools")
    _print_table(console, _pools(mapping))
    for sentence in notes:
        console.print(Prose(f"  {sentence}"))
    if any(pool.gpu.endswith(ESTIMATED) for pool in mapping.pools):
        line = (
            "The GPU is in no table: its speed is estimated from its multiprocessors and clocks, and its links are "
            "taken to be PCIe 4.0 x16."
        )
        console.print(Prose(line))
    if prediction := mapping.prediction:
        _predicted_models(console, mapping, prediction)
        _memory(console, mapping, prediction)
        _times(console, mapping, prediction, prices or {})
        _rejected(console, mapping.rejected, prediction.step_seconds, prices or {})
    else:
        _print_head(console, "models")
        cuts = _table(left=("model", "p-t-d"), gap=2)
        for role in _roles(mapping):
            cuts.add_row(role, str(mapping.sizes[role]))
        _print_table(console, cuts)
        console.print()
        console.print(Prose("No time or memory is predicted: the shapes of the models are not known."))


def _predicted_models(console: Console, mapping: DeviceMapping, prediction: Prediction) -> None:
    _print_head(console, "models")
    for columns in (("cuts", "seconds"),) if console.width >= NARROW else (("cuts",), ("seconds",)):
        _print_table(console, _models(mapping, prediction, columns, gap=2 if console.width >= WIDE else 1))
    if again := ", ".join(role for role in _roles(mapping) if prediction.models[role].recomputes):
        console.print(Prose(f"  layers are recomputed in the backward pass (gradientCheckpointing): {again}"))


def step_price(pools: Iterable[tuple[str, int]], seconds: float, prices: Mapping[str, float]) -> float:
    """Return the price of a step; pools: (GPU type, number of GPUs) of each pool, paid for the whole step."""
    return sum(prices[gpu] * gpus for gpu, gpus in pools) * seconds / 3600


class Prose:
    """Paragraph wrapped at the console's width; no line break parts a number from its unit."""

    def __init__(self, text: str, style: str = "") -> None:
        self.text, self.style = text, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for paragraph in UNIT.sub(NO_BREAK, self.text).split("\n"):
            indent = " " * (len(paragraph) - len(paragraph.lstrip()))
            for line in wrap(paragraph, options.max_width, break_on_hyphens=False, subsequent_indent=indent) or [""]:
                yield Text(line.replace(NO_BREAK, " "), style=self.style)


def _print_head(console: Console, text: str) -> None:
    console.print()
    console.print(Prose(text, "bold"))


def _print_table(console: Console, table: Table) -> None:
    """Print a table, indented by two columns."""
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _pools(mapping: DeviceMapping) -> Table:
    table = _table(left=("pool", "models"), right=("GPUs" if mapping.device == "GPU" else "CPU slots",), gap=2)
    table.add_column("machines x slots")
    if named := any(pool.gpu for pool in mapping.pools):
        table.add_column("type", overflow="fold")
    if zoned := any(pool.zones for pool in mapping.pools):
        table.add_column("zones", overflow="fold")
    for pool in mapping.pools:
        machines = " + ".join(f"{count} x {slots}" for slots, count in Counter(pool.slots_per_machine).items())
        cells = [pool.name, ", ".join(pool.models), str(pool.size), machines]
        table.add_row(*map(Text, [*cells, *[pool.gpu] * named, *[pool.where] * zoned]))
    return table


def _models(mapping: DeviceMapping, prediction: Prediction, columns: Sequence[str], *, gap: int) -> Table:
    """Return the table of models. columns: `cuts` for the parallel sizes, `seconds` for the time of each phase."""
    phases = [phase for phase in PHASES if any(phase in model.seconds for model in prediction.models.values())]
    table = _table(left=("model",), gap=gap)
    if "cuts" in columns:
        table.add_column("p-t-d", overflow="fold")
        if "generation" in phases:
            table.add_column("p_g-t_g-\nd_g", no_wrap=True)
        table.add_column("micro\nbatch", justify="right")
        table.add_column("offload", no_wrap=True)
    for phase in phases if "seconds" in columns else ():
        table.add_column("gene-\nration" if phase == "generation" else phase, justify="right", no_wrap=True)
    for role in _roles(mapping):
        sizes, model = mapping.sizes[role], prediction.models[role]
        ways = f"{sizes.generation_pipeline}-{sizes.generation_tensor}-{sizes.micro}"
        generation = [ways if "generation" in model.seconds else ""] * ("generation" in phases)
        cuts = [str(sizes), *generation, str(model.micro_batch), model.offload]
        seconds = [seconds_text(model.seconds[phase]) if phase in model.seconds else "" for phase in phases]
        table.add_row(role, *cuts * ("cuts" in columns), *seconds * ("seconds" in columns))
    return table


def _roles(mapping: DeviceMapping) -> list[Role]:
    return [role for pool in mapping.pools for role in pool.models]


def _memory(console: Console, mapping: DeviceMapping, prediction: Prediction) -> None:
    """Print for each pool the predicted bytes of one slot at the fullest moment of each stage, and the pool's limit."""
    stages = [stage for stage in STAGES if prediction.stages.get(stage)]
    held = {pool.name: {stage: prediction.peak(pool.models, stage) for stage in stages} for pool in mapping.pools}
    most = max(sum(parts.values()) for stages in held.values() for parts in stages.values())
    power, unit = next((each for each in UNITS if most >= 10 ** each[0]), UNITS[-1])
    cells = console.width - MEMORY_COLUMNS if console.width >= NARROW else 0
    slot = "GPU" if mapping.device == "GPU" else "CPU slot"
    _print_head(console, f"memory of a {slot} in {unit} of 1e{power} bytes")
    for pool in mapping.pools:
        limit = prediction.memory_limit[pool.name]
        console.print(Prose(f"  {pool.name}, limit {plain(limit / 10**power)} {unit}"))
        table = _stages(held[pool.name], limit, scale=10**power, cells=cells)
        table.show_header = pool is mapping.pools[0]
        _print_table(console, table)
        if held_there := prediction.host_memory.get(pool.name):
            console.print(Prose(f"  host memory of {pool.name}: {plain(held_there / 1e9)} GB for each GPU"))
    if any("generation" in model.seconds for model in prediction.models.values()):
        console.print(Prose(f"  gpu_memory_utilization of the generator: {prediction.gpu_memory_utilization:.2f}"))


def _stages(held: Mapping[Stage, Mapping[str, float]], limit: float, *, scale: float, cells: int) -> Table:
    """Return a pool's memory table: bytes of a slot by stage and part; cells: width of the bar, 0 for no bar."""
    table = _table(gap=1)
    table.add_column("", min_width=STAGE_COLUMNS)
    table.add_column("total", justify="right", min_width=NUMBER_COLUMNS)
    if cells:
        table.add_column("of limit", min_width=cells)
    for head in PARTS.values():
        table.add_column(head, justify="right", min_width=max(NUMBER_COLUMNS, *map(len, head.split("\n"))))
    for stage, parts in held.items():
        total = sum(parts.values())
        values = [f"{parts[part] / scale:,.1f}" if parts.get(part) else "" for part in PARTS]
        table.add_row(stage, f"{total / scale:,.1f}", *([_filled(total / limit, cells)] if cells else []), *values)
    return table


def _filled(share: float, cells: int) -> Text:
    """Return a bar that is filled to a share, followed by the percentage."""
    percentage = f" {share:>4.0%}"
    length = cells - len(percentage)
    full = min(length, round(share * length))
    return Text.assemble(("█" * full, "cyan"), ("░" * (length - full), "dim"), percentage)


def _times(console: Console, mapping: DeviceMapping, prediction: Prediction, prices: Mapping[str, float]) -> None:
    seconds = prediction.step_seconds
    step = interval_text(seconds, prediction.low, prediction.high)
    line = f"predicted: {step} a step, {plain(prediction.tokens_per_second)} tokens/s"
    if prices:
        pools = [(pool.gpu, pool.size) for pool in mapping.pools]
        line += f", price {plain(step_price(pools, seconds, prices))} a step"
    if source := prediction.response_source:
        line += f", with responses of {plain(prediction.response_tokens)} tokens ({source})"
    _print_head(console, line)
    if used := prediction.coefficients:
        prompts = f"prompts of {plain(prediction.prompt_tokens)} tokens ({prediction.prompt_source})"
        console.print(Prose(f"  lengths are means; {prompts}; coefficients of {used}"))
    console.print(Prose(f"  by phase: {_listed(prediction.phases, PHASES)}"))
    console.print(Prose(f"  by stage: {_listed(prediction.stages, STAGES)}"))
    timeline = timeline_of(mapping.pools, prediction)
    _print_head(console, f"timeline: stages are barriers, pools overlap within one{timeline.ahead}")
    _print_table(console, chart_of(timeline, columns=console.width - 2))
    console.print(Text("  ") + legend_of(timeline))
    if updates := prediction.fused_updates:
        _print_head(console, "one update of actor and critic (training.fuseUpdates)")
        for each in schedule_lines(updates, columns=console.width):
            console.print(Text(each))


def _listed(seconds: Mapping[Any, float], order: Iterable[str]) -> str:
    """Return names with durations, `generation 4.1 s, scoring 20 ms`, without those that take no time."""
    return ", ".join(f"{name} {seconds_text(seconds[name])}" for name in order if seconds.get(name))


def _rejected(console: Console, placements: Sequence[Rejected], won: float, prices: Mapping[str, float]) -> None:
    if not placements:
        return
    _print_head(console, "best rejected placements")
    table = _table(right=("seconds", "slower"), gap=2)
    table.show_header = False
    table.add_column("why")
    for placement in placements:
        slower = f"{placement.step_seconds / won - 1:+.1%}"
        where = "; ".join(f"{', '.join(models)} on {_slots(gpu, slots)}" for models, gpu, slots in placement.pools)
        if prices:
            pools = [(gpu, slots) for _, gpu, slots in placement.pools]
            where = f"price {plain(step_price(pools, placement.step_seconds, prices))}: {where}"
        why = placement.reason if differ(placement.step_seconds, won) else f"{placement.reason}; within the error"
        table.add_row(seconds_text(placement.step_seconds), slower, Prose(f"{where}\n{why}"))
    _print_table(console, table)


def _infeasible(console: Console, answer: Infeasible) -> None:
    console.print(Prose(f"nothing fits: {answer.reason}"))
    if answer.short_bytes:
        console.print(Prose(f"  short: {answer.short_bytes / 1e9:,.1f} GB of memory (1 GB = 1e9 bytes)"))
    options = (option.replace(" x ", TIMES) for option in answer.options)  # `8 x h100` is one word, as in _slots
    if sufficient := [*options, *(_slots(gpu, slots) for gpu, slots in answer.smallest)]:
        console.print(Prose(f"  would do: {' or '.join(sufficient)}"))


def _slots(gpu: str, slots: int) -> str:
    """Return a count of GPUs and their type as one word; `2 slots` if the type is not known."""
    return f"{slots}{TIMES}{gpu}" if gpu else f"{slots} slots"


def _table(*, left: Iterable[str] = (), right: Iterable[str] = (), gap: int) -> Table:
    """Return a table without borders and rows; left, right: headings of its left- and right-aligned columns."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim", highlight=False)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
