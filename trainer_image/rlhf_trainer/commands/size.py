"""`rlhf size`: hardware, hours and money of a training, without a manifest, a cluster or a network."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import typer
from rich.padding import Padding
from rich.table import Table

from rlhf_api.job import Job
from rlhf_api.kubectl_yaml import write
from rlhf_api.problems import SpecError
from rlhf_importers.peers import commands_of
from rlhf_planning.command_line import print_errors
from rlhf_planning.job_plan import notes_of
from rlhf_planning.mapping_text import COLUMNS, Prose, printing
from rlhf_planning.market import Market
from rlhf_planning.named_model import NamedModel, model_of, size_in_words
from rlhf_planning.sized_job import Training, document_of, placed_document, shapes_of
from rlhf_planning.sizing import RESTART_MINUTES, Limits, Row, Sizing, nodes_for, requested_gpus, size_job
from rlhf_planning.timeline import interval_text, plain
from rlhf_trainer.errors import EnvironmentProblem, TrainerError
from rlhf_trainer.run.preconditions import require_generating
from rlhf_trainer.run_folder.folder import writing

MAX_INSTANCES = 4


def size_and_print(
    name: str,
    training: Training,
    market: Market,
    gpus: str,
    limits: Limits,
    in_json: bool,
    output: Path | None,
    pictures: Sequence[Path],
) -> None:
    """Print the hardware for a training of the model `name`; write the chosen row's files and the pictures.

    Raises EnvironmentProblem if the job fits on none of the requested hardware.
    """
    model, requested = model_of(name), requested_gpus(gpus)

    def sized(sets: Sequence[str]) -> tuple[dict[str, Any], Job, Sizing]:
        document = document_of(model, training._replace(sets=sets))
        job = Job.parse(document)
        require_generating([job], job, Path())
        return document, job, size_job(job, requested, market, limits, training.lengths())

    def compared(job: Job, found: Sizing) -> object:
        return found.as_json(), [*sentences_of(found, job, market, limits)]

    document, job, sizing = sized(training.sets)
    files, title = _files(document, sizing), _title(model, job, training.mean, sizing)
    print_unused_sets(training.sets, compared(job, sizing), lambda sets: compared(*sized(sets)[1:]))
    if output:
        with writing(output):
            output.mkdir(parents=True, exist_ok=True)
            for name in (name for name, (text, _) in files.items() if text):
                (output / name).write_text(files[name][0])
    if in_json:
        found = {"uri": model.uri, "shape": dict(model.shape), "parameters": model.architecture.parameters}
        texts = {name: {"text": text, "remark": remark} for name, (text, remark) in files.items()}
        answer = {"schema_version": 1, "model": found, "found": model.found, "prices": market.date}
        typer.echo(json.dumps({**answer, **sizing.as_json(), "files": texts}, indent=2))
    else:
        print_sizing(sizing, job, market, limits, title=title, closing=_layout(files, output, training.mean))
    for picture in pictures if sizing.rows else ():
        _draw(sizing, title, picture)
    if len(sizing.unfit) == len(requested) and (requested or not sizing.rows):
        raise EnvironmentProblem("; ".join(sizing.unfit) or "the job fits on none of the GPUs with a price")


def print_unused_sets(sets: Sequence[str], whole: object, answer_of: Callable[[Sequence[str]], object]) -> None:
    """Print to stderr each argument of `--set` without which the answer is the same.

    whole: answer with all arguments; answer_of: function for the answer with some of them.
    """
    for place, text in enumerate(sets):
        with suppress(SpecError, TrainerError):  # another argument needs this one
            if answer_of([*sets[:place], *sets[place + 1 :]]) == whole:
                print_errors([f"--set {text} changes nothing of this answer"])


def _title(model: NamedModel, job: Job, mean: int, sizing: Sizing) -> str:
    spec, role = job.spec, job.saved
    rows, samples = spec.training.prompt_batch_size, spec.rollout.samples_per_prompt
    work = f"{rows:,} prompts x {samples} responses" if rows else f"{spec.training.batch_size:,} rows"
    counted = f", counted as {sizing.chosen.prediction.response_tokens:,.0f} on average" if sizing.chosen else ""
    counted += " (--mean TOKENS says what they are)" * bool(rows and not mean)
    same = ", ".join(each for each in job.models() if each not in ("actor", "reference", role))
    lora = job.models()[role].lora
    return (
        f"{spec.algorithm.name} of {model.name}, "
        f"{size_in_words(model.architecture)}{f', LoRA of rank {lora.rank}' if lora else ''}: "
        f"{spec.training.total_steps:,} steps of {work}; prompts of {spec.data.max_prompt_tokens:,} tokens, "
        f"responses of at most {spec.data.max_response_tokens:,}{counted}."
        + f" {model.found}." * bool(model.found)
        + f" Of the same shape: {same}." * bool(same)
    )


def _files(document: dict[str, Any], sizing: Sizing) -> dict[str, tuple[str, str]]:
    """Return file name -> (text, remark) of the chosen row: the manifest, and other projects' command lines."""
    if not (row := sizing.chosen):
        return {}
    placed = placed_document(document, row.mapping)
    commands = commands_of(Job.parse(placed), row.mapping)
    lines = {f"{name}.sh": (command and f"{command}\n", remark) for name, (command, remark) in commands.items()}
    return {"job.yaml": (write(placed), ""), **lines}


def _layout(files: dict[str, tuple[str, str]], output: Path | None, mean: int) -> str:
    """Return a sentence on the files of the chosen row, and on what other projects do otherwise."""
    plan = f" rlhf plan job.yaml --response-tokens {mean} predicts the same." * bool(mean)
    written = ", ".join(name for name, (text, _) in files.items() if text)
    differing = ((name.partition(".")[0], "differs" if text else "cannot", why) for name, (text, why) in files.items())
    remarks = "; ".join(f"{name} {verb}: {why}" for name, verb, why in differing if why)
    verb = f"{output} has" if output else "--output FOLDER writes"
    return f"{verb} this layout as {written}.{plan} {remarks}{'.' * bool(remarks)}" if files else ""


def _draw(sizing: Sizing, title: str, picture: Path) -> None:
    from rlhf_trainer.report.plan_pictures import size_figure  # matplotlib

    if not any(row.offer.on_demand for row in sizing.rows):
        raise EnvironmentProblem(f"{picture}: shows hours against money, and no row has a price (--prices)")
    with writing(picture):
        size_figure(sizing, title, picture)
    typer.echo(f"drawn into {picture}", err=True)


def print_sizing(sizing: Sizing, job: Job, market: Market, limits: Limits, *, title: str, closing: str) -> None:
    """Print the title, what does not fit, the table of hardware, the sentences on it, and `closing`."""
    with printing() as console:
        console.print(Prose(title, "bold"), *map(Prose, sizing.unfit), sep="\n")
        if sizing.rows:
            console.print("", Padding(table_of(sizing, console.width < COLUMNS), 0, expand=False), "", sep="\n")
        for sentence in [*sentences_of(sizing, job, market, limits), closing]:
            console.print(Prose(sentence))


def table_of(sizing: Sizing, is_narrow: bool) -> Table:
    """Return the table of hardware, with an arrow at the chosen row; in a narrow one the intervals may wrap."""
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
    if row.offer.spot is not None:
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
    rows, shapes = dict.fromkeys([row, *sizing.rows, small or row]), shapes_of(job)
    notes = [notes_of(job, each.mapping, nodes_for(job, each.gpu, each.gpus), shapes) for each in rows]
    yield from dict.fromkeys(chain.from_iterable(notes))
    source = row.offer.source
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
    """Format an amount in USD: from 100 on in whole dollars, else with cents."""
    return f"{amount or 0:,.0f}" if (amount or 0) >= 100 else f"{amount or 0:,.2f}"


def _work(row: Row) -> str:
    low, cost, high = (row.cost(hours) for hours in row.hours)
    return f"{hours_text(row)} h" + ("" if cost is None else f", {money(cost)} USD ({money(low)} to {money(high)})")
