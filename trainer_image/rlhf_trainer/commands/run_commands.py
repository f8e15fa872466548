"""Commands `rlhf size`, `why`, `reproduce`, `tune`, `ui`, `serve` and `merge`; slow imports are inside."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
import yaml

from rlhf_api.names import API_VERSION, KIND
from rlhf_api.problems import Problem, SpecError
from rlhf_planning.command_line import Program, uri_of
from rlhf_planning.halving import Budget, Measure, TunedJob, Vary, search_of, show

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="Manifest with one or more RLHFJob documents.")]
OwnSets = Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Set a field.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder: the --output of `rlhf run`.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="[NAME:]PATH=VALUE", help="Set a field of all jobs or, with NAME, of one job."),
]


def why(
    run_dir: RunDir,
    job: Annotated[str | None, typer.Option(metavar="NAME", help="Only this job.")] = None,
    step: Annotated[int | None, typer.Option(min=1, metavar="N", help="Look at the first N steps only.")] = None,
    in_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why a run went as it did: where it changed, likely causes, rows, and what to try."""
    from rlhf_trainer.commands.why import print_why  # numpy: time that `validate` does not need

    print_why(run_dir, only=job, last=step, in_json=in_json)


def reproduce(
    run_dir: RunDir,
    job: Annotated[str | None, typer.Option(help="Name of one job; default: the one that began last.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to make again.")] = 3,
    after: Annotated[
        int | None, typer.Option("--from", metavar="STEP", min=1, help="Step of a checkpoint; default: the start.")
    ] = None,
    sets: OwnSets = None,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Make steps of a run again in RUN_DIR-reproduced, and say whether they are equal, or what differs first."""
    from rlhf_trainer.run.reproduce import reproduce as make_again  # ray: a second

    make_again(run_dir, job=job, count=steps, after=after, sets=sets or (), say=typer.echo)


def tune(
    file: File,
    vary: Vary,
    measure: Measure,
    budget: Budget,
    job: TunedJob = None,
    output: Annotated[Path | None, typer.Option(help="Folder; default: runs/<file name>-tune.")] = None,
    sets: Sets = None,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Search values of a job's fields by successive halving; the same command goes on after an interruption."""
    from rlhf_trainer.run.tuning import Tuning  # ray: a second
    from rlhf_trainer.run_folder.folder import load_with_finished

    folder = output or Path("runs") / f"{file.stem}-tune"
    search = search_of(load_with_finished(folder, file, sets or ()), vary, measure, budget, job)
    best = Tuning(search, file, folder, sets or (), typer.echo).run()
    show(search, best, "rlhf report", lambda trial: str(folder / trial.name))


def ui(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Folder with run folders.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page.")] = 8600,
) -> None:
    """Show the runs below a folder in a browser of this machine: list, live curves, rollouts, comparisons."""
    from rlhf_trainer.commands.ui import serve_runs  # aiohttp and matplotlib: a second

    serve_runs(folder, port)


def serve(
    place: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT", help="Folder of a run, job, or model; or URL.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTION...]", help="Options of vLLM's server.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
) -> None:
    """Serve a trained model by vLLM with OpenAI's API, until Ctrl-C: the last language model of a run."""
    from rlhf_trainer.commands.serve import serve_until_stopped  # torch and transformers: seconds

    serve_until_stopped(place, host=host, port=port, options=options or ())


def merge(
    models: Annotated[list[str], typer.Argument(help="Language models: folders, or URIs such as hf://.")],
    output: Annotated[Path, typer.Option(help="Run folder; the model is in its folder merge/model.")],
    by: Annotated[str, typer.Option(metavar="Linear|SLERP|TIES|DARE|OT", help="Method.")] = "Linear",
    weights: Annotated[str, typer.Option(metavar="NUMBER,...", help="Weights of the models; default: 1.")] = "",
    base: Annotated[str | None, typer.Option(help="Model that the others were made of; for TIES and DARE.")] = None,
    sets: OwnSets = None,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Make OUTPUT/merge/model of several language models, without training; --set adds settings, such as a density."""
    from rlhf_trainer.run.chain import run_file  # ray: a second

    try:
        given = [float(each) for each in weights.split(",")] if weights else [1.0] * len(models)
        merged = [{"uri": uri_of(model), "weight": each} for model, each in zip(models, given, strict=True)]
    except ValueError:
        sentence = f"is {weights}, expected {len(models)} numbers with commas between them"
        raise SpecError([Problem("--weights", sentence)]) from None
    algorithm = {"name": "Merge", "method": by, "models": merged}
    spec = {"algorithm": algorithm | ({"base": uri_of(base)} if base else {})}
    text = yaml.safe_dump({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "merge"}, "spec": spec})
    try:
        run_file(text, output=output, overrides=sets or ())
    except SpecError as error:
        options = {"base": "--base", "method": "--by"}
        for place, model in enumerate(models):
            options |= {f"models.{place}.uri": model, f"models.{place}.weight": "--weights"}
        names = {f"merge: spec.algorithm.{field}": option for field, option in options.items()}
        found = dict.fromkeys(replace(each, path=names.get(each.path, each.path)) for each in error.problems)
        raise SpecError(replace(each, message=each.message.removesuffix(", or --restart")) for each in found) from None
    typer.echo(f"model: {output / 'merge' / 'model'}")


def size(
    model: Annotated[str, typer.Argument(help="Folder with a config.json, known model, or size such as 7b.")],
    algorithm: Annotated[str, typer.Option(metavar="NAME", help="Algorithm of the training.")] = "GRPO",
    response: Annotated[str, typer.Option(metavar="TOKENS", help="Longest response, such as 16k.")] = "2k",
    mean: Annotated[str, typer.Option(metavar="TOKENS", help="Mean length of responses.")] = "",
    prompt: Annotated[str, typer.Option(metavar="TOKENS", help="Length of prompts.")] = "1k",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, or rows without RL, of a step.")] = 128,
    samples: Annotated[int | None, typer.Option(min=1, help="Responses to each prompt in RL; default: 8.")] = None,
    lora: Annotated[int, typer.Option(min=0, metavar="RANK", help="Train an adapter of this rank.")] = 0,
    gpus: Annotated[str, typer.Option(metavar="any|TYPE[=NUMBER],...", help="As h100,a100 or h100=16.")] = "any",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole job.")] = 200,
    budget: Annotated[float, typer.Option(min=0, metavar="USD", help="Most money for the job.")] = 0.0,
    deadline: Annotated[str, typer.Option(metavar="TIME", help="Most time for the job, such as 48h.")] = "",
    step_time: Annotated[str, typer.Option(metavar="TIME", help="Most time for a step, such as 2min.")] = "",
    prices: Annotated[Path | None, typer.Option(metavar="FILE", help="Your prices, as h100: 2.5.")] = None,
    in_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the manifest.")] = False,
    output: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write the layout, for others too.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw hours against money.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="The same as PNG.")] = None,
    sets: OwnSets = None,
) -> None:
    """Say what hardware a training needs, with hours and money; no manifest, cluster or network."""
    from rlhf_planning.market import market_of
    from rlhf_planning.sized_job import Training, seconds_of, tokens_of
    from rlhf_planning.sizing import Limits
    from rlhf_trainer.commands.size import size_and_print  # numpy: time that `validate` does not need

    lengths = {"response": response, "prompt": prompt, "mean": mean}
    tokens = {name: tokens_of(text, f"--{name}") if text or name != "mean" else 0 for name, text in lengths.items()}
    counts = {"samples": samples or 0, "prompts": prompts, "lora": lora, "steps": steps}
    training = Training(algorithm, **tokens, **counts, sets=sets or ())
    limited = {"--deadline": deadline, "--step-time": step_time}
    times = [seconds_of(text, path) if text else math.inf for path, text in limited.items()]
    limits = Limits(budget=budget or math.inf, deadline=times[0], step=times[1])
    pictures = [each for each in (svg, png) if each]
    size_and_print(model, training, market_of(prices), gpus, limits, in_json, output, pictures)


def declare(program: Program) -> None:
    """Declare the commands, each with an example."""
    program.command("rlhf size 32b --algorithm GRPO --response 16k --mean 6k --steps 200 --deadline 48h")(size)
    program.command("rlhf why runs/first --job helpful-ppo")(why)
    program.command("rlhf reproduce runs/first --job helpful-ppo --steps 3")(reproduce)
    program.command("rlhf tune job.yaml --vary training.seed=1,2,3 --measure evaluation/reward --budget 300")(tune)
    program.command("rlhf ui runs --port 8600")(ui)
    program.command("rlhf serve runs/first --port 8000")(serve)
    program.command("rlhf merge runs/a/helpful/model runs/b/harmless/model --by OT --output runs/both")(merge)
