"""`rlhf size`: hardware, hours and money of a training, without a manifest, a cluster or a network."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from rlhf_api.job import Job
from rlhf_api.kubectl_yaml import write
from rlhf_importers.peers import commands_of
from rlhf_planning.asked_model import AskedModel, model_of, size_in_words
from rlhf_planning.market import Market
from rlhf_planning.sized_job import Training, document_of, placed_document, seconds_of
from rlhf_planning.sizing import Limits, Sizing, size_job, wanted_gpus
from rlhf_planning.sizing_text import print_sizing
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run_folder.folder import writing

TIMES = ("--deadline", "--step-time")


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

    Raises EnvironmentProblem if the job fits on none of the asked hardware.
    """
    model, wanted = model_of(name), wanted_gpus(gpus)
    document = document_of(model, training)
    job = Job.parse(document)
    sizing = size_job(job, wanted, market, limits, training.lengths())
    files, title = _files(document, sizing), _title(model, job, training.mean, sizing)
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
        print_sizing(sizing, job, market, limits, title=title, closing=_layout(files, output))
    for picture in pictures if sizing.rows else ():
        _draw(sizing, title, picture)
    if len(sizing.unfit) == len(wanted) and (wanted or not sizing.rows):
        raise EnvironmentProblem("; ".join(sizing.unfit) or "the job fits on none of the GPUs with a price")


def limits_of(budget: float, deadline: str, step: str) -> Limits:
    """Return the limits of `--budget`, `--deadline` and `--step-time`, of which any may be 0 or empty. SpecError."""
    times = [seconds_of(text, path) if text else math.inf for text, path in zip((deadline, step), TIMES, strict=True)]
    return Limits(budget=budget or math.inf, deadline=times[0], step=times[1])


def _title(model: AskedModel, job: Job, mean: int, sizing: Sizing) -> str:
    spec, role = job.spec, job.saved
    rows, samples = spec.training.prompt_batch_size, spec.rollout.samples_per_prompt
    work = f"{rows:,} prompts x {samples} responses" if rows else f"{spec.training.batch_size:,} rows"
    counted = f", counted as {sizing.chosen.prediction.response_tokens:,.0f} on average" if sizing.chosen else ""
    counted += " (--mean TOKENS says what they are)" * bool(rows and not mean)
    same = ", ".join(each for each in job.models() if each not in ("actor", "reference", role))
    lora = job.models()[role].lora
    return (
        f"{spec.algorithm.name} of {model.shape.get('name') or model.uri.rpartition('/')[2]}, "
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


def _layout(files: dict[str, tuple[str, str]], output: Path | None) -> str:
    """Return a sentence on the files of the chosen row, and on what other projects do otherwise."""
    written = ", ".join(name for name, (text, _) in files.items() if text)
    differing = ((name.partition(".")[0], "differs" if text else "cannot", why) for name, (text, why) in files.items())
    remarks = "; ".join(f"{name} {verb}: {why}" for name, verb, why in differing if why)
    verb = f"{output} has" if output else "--output FOLDER writes"
    return f"{verb} this layout as {written}. {remarks}{'.' * bool(remarks)}" if files else ""


def _draw(sizing: Sizing, title: str, picture: Path) -> None:
    try:
        from rlhf_trainer.report.size_picture import size_figure
    except ModuleNotFoundError as error:
        message = f"{picture}: is drawn by {error.name}, which is not installed: pip install 'rlhf-operator[plots]'"
        raise EnvironmentProblem(message) from error
    if not any(row.price for row in sizing.rows):
        raise EnvironmentProblem(f"{picture}: shows hours against money, and no row has a price (--prices)")
    with writing(picture):
        size_figure(sizing, title, picture)
    typer.echo(f"drawn into {picture}", err=True)
