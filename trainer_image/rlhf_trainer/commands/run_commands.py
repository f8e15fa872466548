"""Commands about runs and models (`rlhf why`, `reproduce`, `tune`, `ui`, `serve`, `merge`); slow imports are inside."""

from pathlib import Path
from typing import Annotated

import typer
import yaml

from rlhf_api.names import API_VERSION, KIND
from rlhf_api.problems import Problem, SpecError
from rlhf_planning.command_line import Program, uri_of
from rlhf_planning.halving import Budget, Measure, TunedJob, Vary, search_of, show

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder: the --output of `rlhf run`.")]


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
    output: Annotated[
        Path | None, typer.Option(help="New run folder; default: RUN_DIR with -reproduced at its end.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a field of the job.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,  # noqa: ARG001
) -> None:
    """Make steps of a run again and say whether they are equal, or what differs first."""
    from rlhf_trainer.run.reproduce import reproduce as make_again  # ray: a second

    make_again(run_dir, job=job, count=steps, after=after, output=output, sets=sets or (), say=typer.echo)


def tune(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Manifest with one or more RLHFJob documents.")],
    vary: Vary,
    measure: Measure,
    budget: Budget,
    job: TunedJob = None,
    output: Annotated[Path | None, typer.Option(help="Folder; default: runs/<file name>-tune.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="[NAME:]PATH=VALUE", help="Change a field of all trials.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,  # noqa: ARG001
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
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Set a field.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,  # noqa: ARG001
) -> None:
    """Make one language model of several, without training; --set adds settings, such as a density."""
    from rlhf_trainer.outputs.opening import OutputOptions
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
    options = OutputOptions()
    run_file(text, output=output, overrides=sets or (), restart=False, address=None, options=options)


def declare(program: Program) -> None:
    """Declare the commands, each with an example."""
    program.command("rlhf why runs/first --job helpful-ppo")(why)
    program.command("rlhf reproduce runs/first --job helpful-ppo --steps 3")(reproduce)
    program.command("rlhf tune job.yaml --vary training.seed=1,2,3 --measure evaluation/reward --budget 300")(tune)
    program.command("rlhf ui runs --port 8600")(ui)
    program.command("rlhf serve runs/first --port 8000")(serve)
    program.command("rlhf merge runs/a/helpful/model runs/b/harmless/model --by OT --output runs/both")(merge)
