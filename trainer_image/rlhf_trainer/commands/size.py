"""`rlhf size`: hardware, hours and money of a training, without a manifest, a cluster or a network."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from rlhf_api.job import Job
from rlhf_api.kubectl_yaml import write
from rlhf_api.problems import Problem, SpecError
from rlhf_importers.peers import commands_of
from rlhf_planning.asked_model import AskedModel, size_in_words
from rlhf_planning.market import Market
from rlhf_planning.sized_job import Training, document_of, placed_document, seconds_of
from rlhf_planning.sizing import Limits, Sizing, size_job, wanted_gpus
from rlhf_planning.sizing_text import print_sizing
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run_folder.folder import writing


def size_and_print(
    model: AskedModel,
    training: Training,
    market: Market,
    *,
    gpus: str,
    limits: Limits,
    in_json: bool,
    output: Path | None,
    pictures: Sequence[Path],
) -> None:
    """Print the hardware for a training, as text or JSON; write the chosen row's files and the pictures.

    Raises EnvironmentProblem if the job fits on none of the asked hardware.
    """
    document = document_of(model, training)
    job, wanted = Job.parse(document), wanted_gpus(gpus)
    sizing = size_job(job, wanted, market, limits, training.lengths())
    files, title = _files(document, sizing), _title(model, training, job, sizing)
    if in_json:
        typer.echo(json.dumps(_document(model, market, sizing, files), indent=2))
    else:
        print_sizing(sizing, job, market, limits, title=title, closing=_layout(files, output))
    if output:
        with writing(output):
            output.mkdir(parents=True, exist_ok=True)
            for name in (name for name, (text, _) in files.items() if text):
                (output / name).write_text(files[name][0])
    for picture in pictures:
        _draw(sizing, title, picture)
    if len(sizing.unfit) == len(wanted) and (wanted or not sizing.rows):
        raise EnvironmentProblem("; ".join(sizing.unfit) or "the job fits on none of the GPUs with a price")


def limits_of(budget: float | None, deadline: str | None, step: str | None) -> Limits:
    """Return the limits of `--budget`, `--deadline` and `--step-time`. Raises SpecError."""
    if budget is not None and budget <= 0:
        raise SpecError([Problem("--budget", f"is {budget:g}, expected USD above 0")])
    given = {"budget": budget, "deadline": deadline and seconds_of(deadline, "--deadline")}
    given["step"] = step and seconds_of(step, "--step-time")
    return Limits(**{name: float(value) for name, value in given.items() if value})


def _title(model: AskedModel, training: Training, job: Job, sizing: Sizing) -> str:
    data, offline = job.spec.data, job.spec.algorithm.offline
    name = model.shape.get("name") or model.uri.rpartition("/")[2]
    prompts, samples = job.spec.training.prompt_batch_size, job.spec.rollout.samples_per_prompt
    rows = f"{job.spec.training.batch_size:,} rows" if offline else f"{prompts:,} prompts x {samples} responses"
    counted = f", counted as {sizing.chosen.prediction.response_tokens:,.0f} on average" if sizing.chosen else ""
    unsaid = " (--mean TOKENS says what they are)" if counted and not training.mean and not offline else ""
    same = [role for role in job.models() if role not in ("actor", "reference", job.saved)]
    return (
        f"{job.spec.algorithm.name} of {name}, {size_in_words(model.architecture)}"
        + f", LoRA of rank {training.lora}" * bool(training.lora)
        + f": {job.spec.training.total_steps:,} steps of {rows}; prompts of {data.max_prompt_tokens:,} tokens, "
        f"responses of at most {data.max_response_tokens:,}{counted}{unsaid}."
        + f" {model.found[:1].upper()}{model.found[1:]}." * bool(model.found)
        + f" Of the same shape: {', '.join(same)}." * bool(same)
    )


def _files(document: dict[str, Any], sizing: Sizing) -> dict[str, tuple[str, str]]:
    """Return file name -> (text, remark) of the chosen row: the manifest, and other projects' command lines."""
    if not (row := sizing.chosen):
        return {}
    placed = placed_document(document, row.mapping)
    files = {"job.yaml": (write(placed), "")}
    for project, (command, remark) in commands_of(Job.parse(placed), row.mapping).items():
        files[f"{project}.sh"] = (command and f"{command}\n", remark)
    return files


def _layout(files: dict[str, tuple[str, str]], output: Path | None) -> str:
    """Return a sentence on the files of the chosen row: those that there are, and what other projects do otherwise."""
    written = ", ".join(name for name, (text, _) in files.items() if text)
    remarks = "; ".join(
        f"{name.removesuffix('.sh')}{' differs' if text else ' cannot'}: {remark}"
        for name, (text, remark) in files.items()
        if remark
    )
    verb = f"{output} has" if output else "--output FOLDER writes"
    return f"{verb} this layout as {written}. {remarks}{'.' * bool(remarks)}" if files else ""


def _document(model: AskedModel, market: Market, sizing: Sizing, files: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Return the answer as the JSON object of `rlhf size --json`, with the same keys in every case."""
    return {
        "schema_version": 1,
        "model": {"uri": model.uri, "shape": dict(model.shape), "parameters": model.architecture.parameters},
        "found": model.found,
        "prices": market.date,
        "rows": [row.as_json() for row in sizing.rows],
        "chosen": sizing.chosen and sizing.chosen.as_json(),
        "why": sizing.why,
        "smallest": sizing.smallest and sizing.smallest.as_json(),
        "unfit": list(sizing.unfit),
        "files": {name: {"text": text, "remark": remark} for name, (text, remark) in files.items()},
    }


def _draw(sizing: Sizing, title: str, picture: Path) -> None:
    try:
        from rlhf_trainer.report.size_picture import size_figure
    except ModuleNotFoundError as error:
        message = f"{picture}: is drawn by {error.name}, which is not installed: pip install 'rlhf-operator[plots]'"
        raise EnvironmentProblem(message) from error
    with writing(picture):
        size_figure(sizing, title, picture)
    typer.echo(f"drawn into {picture}", err=True)
