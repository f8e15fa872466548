"""Command line of the trainer: `rlhf --help` lists the commands."""

import io
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
import yaml

from rlhf_api.job import Job
from rlhf_api.names import API_VERSION, KIND
from rlhf_api.problems import Problem, SpecError
from rlhf_planning.command_line import Follow, Once, Program, print_errors, uri_of
from rlhf_planning.lengths import METAVAR
from rlhf_trainer.commands import run_commands
from rlhf_trainer.commands.ending import ending, leave
from rlhf_trainer.commands.run_commands import Debug, File, RunDir, Sets
from rlhf_trainer.errors import reason_of, together
from rlhf_trainer.run.stopping import Stopped, heeded
from rlhf_trainer.run_folder.attempt import write_exit

program = Program(
    "rlhf",
    "RLHF of language models: one manifest, on this machine or on a cluster.",
    lambda work, debug: leave(ending(work, debug=debug)[0]),
)
app, command = program.app, program.command
PROJECT = Path(__file__).with_name("project")
Finished = Annotated[
    Path | None, typer.Option(help="Run folder whose finished jobs job:// may name; default: runs/<file name>.")
]


@command("rlhf run examples/01-helpful-ppo.yaml --output runs/first")
def run(
    file: File,
    output: Annotated[Path | None, typer.Option(help="Run folder; default: runs/<file name>.")] = None,
    sets: Sets = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all jobs.")] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete what earlier runs of these jobs left, and start over.")
    ] = False,
    address: Annotated[str | None, typer.Option(help="Ray's address; default: RAY_ADDRESS, or else a new Ray.")] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write event files to tensorboard/<job> in the run folder.")
    ] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Also keep the latest steps in <job>/trace.json.")] = False,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Serve metrics for Prometheus on this port.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run the jobs of a manifest in dependency order."""
    overrides = [*(sets or []), *([f"spec.training.seed={seed}"] if seed is not None else [])]
    folder = run_folder(file, output)

    def leave_at_once(received: int, _: object) -> None:
        stopped = Stopped(received)
        write_exit(folder, stopped.exit_code, reason=reason_of(stopped.exit_code), message=str(stopped))
        os._exit(stopped.exit_code)

    def work() -> None:
        for number in heeded():  # while the imports run there is nothing to clean up
            signal.signal(number, leave_at_once)
        from rlhf_trainer.outputs.opening import OutputOptions
        from rlhf_trainer.run.chain import run_file  # ray: a second that `validate` does not need

        options = OutputOptions(tensorboard=tensorboard, trace=trace, metrics_port=metrics_port)
        run_file(file, output=folder, overrides=overrides, restart=restart, address=address, options=options)

    code, message = ending(work, debug=debug)
    write_exit(folder, code, reason=reason_of(code), message=message)
    leave(code)


@command("rlhf generate runs/first/helpful-ppo/model prompts.jsonl --samples 4")
def generate(
    model: Annotated[str, typer.Argument(help="Language model: a folder, or a URI such as hf://.")],
    data: Annotated[str, typer.Argument(help="Prompts: a file, a folder, or a URI such as hf://.")],
    output: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/generate"),
    samples: Annotated[int, typer.Option(min=1, help="Number of responses to each prompt.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Number of prompts that are answered at once.")] = 64,
    sets: Sets = None,
    debug: Debug = False,
) -> None:
    """Write a model's responses to prompts as a data set; --set adds settings, such as a reward."""
    from rlhf_trainer.run_folder.folder import writing

    spec = {
        "algorithm": {"name": "Generate"},
        "models": {"actor": {"uri": uri_of(model)}},
        "data": {"train": {"uri": uri_of(data)}},
        "rollout": {"samplesPerPrompt": samples},
        "training": {"totalEpochs": 1, "promptBatchSize": batch},
    }
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "generate"}, "spec": spec}
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        (output / "generate.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    run(output / "generate.yaml", output, sets=sets, debug=debug)


@command("rlhf init my-project")
def init(folder: Annotated[Path, typer.Argument(metavar="NAME", help="New folder of the project.")]) -> None:
    """Write a small project: a manifest, an algorithm and a reward of its own, and a test."""
    from rlhf_trainer.run_folder.folder import writing

    if folder.exists():
        raise SpecError([Problem(str(folder), "is there already; name a new folder")])
    with writing(folder):
        folder.mkdir(parents=True)
        files = [shutil.copyfile(file, folder / file.name) for file in sorted(PROJECT.glob("*.*"))]
    for file in files:
        typer.echo(file)
    typer.echo(f"try: cd {folder}; rlhf validate job.yaml; python -m pytest; rlhf run job.yaml")


@command("rlhf validate job.yaml --deep")
def validate(
    file: File,
    output: Finished = None,
    sets: Sets = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also try models, data, functions and disk, as `rlhf run` does at its start.")
    ] = False,
) -> None:
    """Check a manifest: print every error, or ok and the checkpoint sizes of models with known shapes."""
    from rlhf_mapper.config_file import made_from, manifest_architecture
    from rlhf_planning.checkpoint_size import in_words

    jobs = valid_jobs(file, sets, run_folder(file, output)) if deep else jobs_of(file, sets, output)
    typer.echo("ok")
    by_name = {each.name: each for each in jobs}
    for job in jobs:
        shapes = {role: manifest_architecture(job, role, *made_from(job, role, by_name)) for role in job.trained()}
        if sentence := in_words(job, {role: shape for role, shape in shapes.items() if shape}):
            typer.echo(f"{job.name}: {sentence}")


@command("rlhf plan job.yaml --nodes 16 --gpus-per-node 8 --gpu a100-80g")
def plan(
    file: File,
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Name of one job; default: all jobs.")] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Nodes to plan for instead of resources.nodes x slotsPerNode; default: this machine."),
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="Number of GPUs of each node.")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Type of the GPUs, such as a100-80g.")] = None,
    inventory: Annotated[Path | None, typer.Option(metavar="FILE", help="Plan for this file's cluster.")] = None,
    objective: Annotated[
        str | None,
        typer.Option(metavar="throughput|fewest-gpus=SECONDS|lowest-cost", help="Objective instead of the manifest's."),
    ] = None,
    in_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: an object for one job, a list in running order for several.")
    ] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Draw a step's calls and their data instead.")] = False,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw the timeline of a step, or the graph, into this SVG file."),
    ] = None,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN_DIR", help="Correct predictions by a run's times on the same GPU type; repeatable."),
    ] = None,
    response_tokens: Annotated[
        str | None,
        typer.Option(metavar=METAVAR, help="Lengths of responses; default: of an earlier run, or assumed."),
    ] = None,
    prompt_tokens: Annotated[
        str | None, typer.Option(metavar=METAVAR, help="Lengths of prompts (`rlhf data`); default: all at their limit.")
    ] = None,
    output: Finished = None,
    sets: Sets = None,
) -> None:
    """Say where the models of a manifest would live, how they would be sharded, and what a step would take."""
    from rlhf_planning.machines import requested_cluster
    from rlhf_trainer.commands.plan import JobPlan, choose, plans_of, print_plans  # numpy, slow to import
    from rlhf_trainer.commands.size import print_unused_sets

    def plans_with(sets: Sequence[str] | None) -> list[JobPlan]:
        jobs = jobs_of(file, sets, output)
        chosen = choose(jobs, only=job, in_json=in_json, graph=graph, svg=svg)
        cluster = requested_cluster(nodes=nodes, gpus_per_node=gpus_per_node, gpu=gpu, inventory=inventory)
        known = {"responses": response_tokens, "prompts": prompt_tokens, "objective": objective}
        return plans_of(chosen, jobs, run_folder(file, output), cluster, calibrate=calibrate or (), **known)

    print_plans(plans := plans_with(sets), in_json=in_json, graph=graph, svg=svg)
    print_unused_sets(() if graph else sets or (), plans, plans_with)


run_commands.declare(program)


@command("rlhf checkpoints runs/first")
def checkpoints(run_dir: RunDir) -> None:
    """List the checkpoints of a run: step, size, age, whether each is whole, and which is the best."""
    from rlhf_trainer.run_folder.commands import show_checkpoints

    show_checkpoints(run_dir)


@command("rlhf export runs/first/helpful-ppo/checkpoints/step-000010 model")
def export(
    checkpoint: Annotated[str, typer.Argument(help="Folder or URL of a checkpoint, as `rlhf checkpoints` shows it.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the model.")],
    merge: Annotated[bool, typer.Option("--merge", help="Write an adapter merged into its base model.")] = False,
) -> None:
    """Write a checkpoint's model as a Hugging Face folder, or its adapter as a PEFT folder."""
    from rlhf_trainer.run_folder.export import export as export_model

    export_model(checkpoint, folder, merges=merge)
    typer.echo(folder)


@command("rlhf save-now runs/first")
def save_now(run_dir: RunDir) -> None:
    """Have a running job save a checkpoint after its current step; wait until it is saved."""
    from rlhf_trainer.run_folder.commands import save_now as save

    typer.echo(save(run_dir))


@command("rlhf top runs/first")
def top(
    run_dirs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN_DIR", help="Run folders; default: all below runs/.")
    ] = None,
    once: Once = False,
) -> None:
    """Show the state of jobs, anew every two seconds: phase, step, reward or loss, speed, time left, checkpoint."""
    from rlhf_trainer.run_folder.commands import show_jobs

    show_jobs(run_dirs or [], once=once)


@command("rlhf logs runs/first helpful-ppo --follow")
def logs(
    run_dir: RunDir,
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Name of one job; default: all jobs.")] = None,
    follow: Follow = False,
) -> None:
    """Show what happened in a run, in order of time: events, failures, and the stacks of ranks at a hang."""
    from rlhf_trainer.run_folder.commands import show_logs

    show_logs(run_dir, job=job, follow=follow)


@command("rlhf samples runs/first --best 5")
def samples(
    run_dir: RunDir,
    job: Annotated[str | None, typer.Option(help="Name of one job; default: all that kept rollouts.")] = None,
    step: Annotated[int | None, typer.Option(help="Step of the responses; default: the last step.")] = None,
    worst: Annotated[int, typer.Option(min=1, help="Show this many responses with the lowest reward.")] = 10,
    best: Annotated[int | None, typer.Option(min=1, help="Show this many responses with the highest reward.")] = None,
) -> None:
    """Show responses that a job learned from and that rollout.keep has kept."""
    from rlhf_trainer.run_folder.rollouts import show_samples

    show_samples(run_dir, job=job, step=step, count=best or worst, best=best is not None)


@command("rlhf data job.yaml --job helpful-sft")
def data(
    file: File,
    job: Annotated[str | None, typer.Option(help="Name of one job; default: all jobs.")] = None,
    prompt_tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the length of each prompt, for `rlhf plan`.")
    ] = None,
    output: Finished = None,
    sets: Sets = None,
) -> None:
    """Show the data that jobs read: rows, lengths, dropped rows and why, and examples with trained tokens marked."""
    from rlhf_trainer.commands.data import print_data  # torch and transformers: seconds

    print_data(jobs_of(file, sets, output), run_folder(file, output), only=job, prompt_tokens=prompt_tokens)


@command("rlhf reward job.yaml --rows 5")
def reward(
    file: File,
    job: Annotated[str | None, typer.Option(help="One of the jobs; default all with rewards.")] = None,
    rows: Annotated[int, typer.Option(min=0, help="First rows of the data to try.")] = 20,
    responses: Annotated[Path | None, typer.Option(help='Lines of {"row": 3, "response": "..."} to score.')] = None,
    judges: Annotated[bool, typer.Option("--judges", help="Also ask the judges.")] = False,
    in_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Finished = None,
    sets: Sets = None,
) -> None:
    """Score an empty response, the right answer and texts of your own by a job's rewards, without any model."""
    from rlhf_trainer.commands.data import print_rewards  # torch and transformers: seconds

    jobs, folder = jobs_of(file, sets, output), run_folder(file, output)
    print_rewards(jobs, folder, only=job, rows=rows, texts=responses, judges=judges, in_json=in_json)


@command("rlhf report runs/first")
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run folders, written by `rlhf run`.")],
    debug: Debug = False,  # noqa: ARG001 `command` reads it
) -> None:
    """Write RUN_DIR/report.html, a page about the run that needs no network, or compare.html for several runs."""
    from rlhf_trainer.report.compare import write_comparison  # matplotlib: a second that `validate` does not need
    from rlhf_trainer.report.page import write_report

    typer.echo(write_comparison(folders) if len(folders) > 1 else write_report(folders[0]))


@command("rlhf import run_grpo.sh --from verl --output job.yaml", name="import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Configuration (YAML) or script for the other project.")],
    project: Annotated[str, typer.Option("--from", metavar="verl|openrlhf|trl", help="Project that FILE is for.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Manifest to write; default: stdout.")] = None,
    algorithm: Annotated[
        str | None, typer.Option(metavar="NAME", help="Algorithm of a TRL file that does not name its trainer.")
    ] = None,
) -> None:
    """Write a manifest from another project's configuration."""
    from rlhf_importers.command import import_file

    for text, is_manifest in import_file(file, project, output=output, algorithm=algorithm):
        typer.echo(text, nl=not is_manifest, err=not is_manifest)


for point in entry_points(group="rlhf.commands"):
    point.load()(program)


def jobs_of(file: Path, sets: Sequence[str] | None, output: Path | None) -> list[Job]:
    """Return the jobs of a manifest; `job://` may also name a finished job of the run folder."""
    from rlhf_trainer.run_folder.folder import load_with_finished

    return load_with_finished(run_folder(file, output), file, sets or [])


def valid_jobs(file: Path, sets: Sequence[str] | None, output: Path) -> list[Job]:
    """Return the jobs of a manifest after `deep_check`; mistakes of its fields are printed before the check begins."""
    from rlhf_api.files import read
    from rlhf_trainer.run_folder.folder import finished_jobs

    jobs, mistakes = read(file, sets or [], {name: job.algorithm for name, job in finished_jobs(output).items()})
    print_errors([f"error: {mistake}" for mistake in mistakes])
    from rlhf_trainer.run.deep_check import problems  # torch and transformers: seconds

    found = [error for _, error in problems(jobs, jobs, output)]
    if mistakes:  # printed above
        raise SpecError(Problem(*str(error).partition(": ")[::2]) for error in found)
    if found:
        raise together(found)
    return jobs


def run_folder(file: Path, output: Path | None) -> Path:
    """Return the run folder of a manifest: `output`, or runs/<file name>."""
    return output or Path("runs") / file.stem


def main() -> None:
    """Entry point of the `rlhf` command; characters that a terminal cannot show become `?`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()


if __name__ == "__main__":
    main()
