"""Text of the answer of `rlhf size`: a table of hardware, and sentences on the chosen row."""

import math
import re
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from rlhf_api.job import Job
from rlhf_mapper.hardware import Cluster
from rlhf_planning.job_plan import notes_of
from rlhf_planning.mapping_text import COLUMNS, Prose
from rlhf_planning.market import Market, usual_nodes
from rlhf_planning.sized_job import shapes_of
from rlhf_planning.sizing import RESTART_MINUTES, Limits, Row, Sizing
from rlhf_planning.timeline import interval_text, plain

MAX_INSTANCES = 4


def print_sizing(sizing: Sizing, job: Job, market: Market, limits: Limits, *, title: str, closing: str) -> None:
    """Print the table between its sentences to stdout, in COLUMNS columns if that is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = COLUMNS
    with console.capture() as shown:
        console.print(Prose(title, "bold"))
        for sentence in sizing.unfit:
            console.print(Prose(sentence))
        if sizing.rows:
            console.print("", Padding(table_of(sizing, console.width < COLUMNS), 0, expand=False), "", sep="\n")
        for sentence in [*sentences_of(sizing, job, market, limits), closing]:
            console.print(Prose(sentence))
    typer.echo(re.sub(r" +$", "", shown.get(), flags=re.MULTILINE), nl=False)


def table_of(sizing: Sizing, is_narrow: bool) -> Table:
    """Return the table of hardware, a row for each; the chosen one has an arrow. If narrow, intervals are broken."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", highlight=False)
    for name in ("", "GPUs", "type", "a step", "hours", "USD", "free"):
        table.add_column(
            name,
            justify="left" if name in ("", "type") else "right",
            no_wrap=not (is_narrow and name in ("a step", "hours")),
        )
    table.add_column("tight", overflow="fold")
    for row in sizing.rows:
        cost = "no price" if row.cost() is None else money(row.cost())
        step = interval_text(*(row.seconds[case] for case in (1, 0, 2)))
        mark, style = (">", "bold") if row is sizing.chosen else ("", "")
        free = f"{row.room[0] / 1e9:.0f} GB"
        table.add_row(mark, str(row.gpus), row.gpu, step, hours_text(row), cost, free, row.tight, style=style)
    return table


def sentences_of(sizing: Sizing, job: Job, market: Market, limits: Limits) -> Iterator[str]:
    """Yield sentences on the chosen row, its spot price, the smallest hardware, instance types, and prices."""
    if not (row := sizing.chosen):
        yield "The job fits on none of the hardware that was asked for."
        return
    phase, share = row.slowest
    yield f"> {name_of(row)} is {sizing.why}: {_work(row)}; {share:.0%} of it is {phase}."
    if (cost := row.cost()) and limits.budget < math.inf:
        yield f"  {money(limits.budget)} USD buy about {int(limits.budget / cost * row.steps):,} steps on it."
    if row.spot is not None:
        minutes = job.spec.checkpoint.every_minutes
        lost = (minutes / 2 + RESTART_MINUTES) / 60
        yield (
            f"  On spot {money(row.cost(spot=True))} USD, and {money(row.cost(lost, spot=True))} more for each "
            f"interruption: half of the {minutes:g} minutes between checkpoints, and {RESTART_MINUTES:g} to restart."
        )
    if row.instances:
        more = f" and {len(row.instances) - MAX_INSTANCES} more" * (len(row.instances) > MAX_INSTANCES)
        names = (name.partition(" (")[0] for name in row.instances[:MAX_INSTANCES])
        yield f"  Instances: {f'{row.nodes} of ' * (row.nodes > 1)}{', '.join(names)}{more}."
    if (small := sizing.smallest) and small is not row:
        yield f"Smallest that fits: {name_of(small)}, {_work(small)}{f'; {small.tight}' * bool(small.tight)}."
    yield from notes_of(row.mapping, Cluster((usual_nodes(row.gpu, row.gpus),)), shapes_of(job))
    source = market.offer(row.gpu).source
    yield (
        f"Prices: {market.date}{f', {source}' * bool(source)}; GPUs alone, on demand. Intervals: errors of a fit on "
        "published steps, one source left out at a time; no GPU has run any."
    )


def name_of(row: Row) -> str:
    """Return a row's hardware in words: `16 x h100-80g (2 nodes of 8)`."""
    nodes = f" ({row.nodes} nodes of {row.gpus // row.nodes})" * (row.nodes > 1)
    return f"{row.gpus} x {row.gpu}{nodes}"


def hours_text(row: Row) -> str:
    """Return the hours of a job with their interval: `31.2 (20.3 to 46.8)`."""
    low, hours, high = map(plain, row.hours)
    return f"{hours} ({low} to {high})"


def money(amount: float | None) -> str:
    """Format USD: whole ones from 100, else cents."""
    return f"{amount or 0:,.0f}" if (amount or 0) >= 100 else f"{amount or 0:,.2f}"


def _work(row: Row) -> str:
    low, cost, high = (row.cost(hours) for hours in row.hours)
    return f"{hours_text(row)} h" + ("" if cost is None else f", {money(cost)} USD ({money(low)} to {money(high)})")
