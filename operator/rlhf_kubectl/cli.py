"""Command line of the plugin: `kubectl rlhf --help` lists the commands."""

import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer._completion_classes import completion_init

from rlhf_api import kubectl_yaml
from rlhf_api.exit_codes import ExitCode
from rlhf_api.problems import SpecError
from rlhf_kubectl.jobs import ENDED_PHASES, find_job, head_of, line_of, list_jobs, pods_of, settings_of
from rlhf_kubectl.kubectl import Kubectl, KubectlError
from rlhf_operator import names
from rlhf_operator.settings import Settings
from rlhf_planning.command_line import Context, Follow, Namespace, Once, Program, print_errors
from rlhf_planning.halving import Budget, Measure, TunedJob, Vary
from rlhf_planning.job_table import show
from rlhf_planning.numbers import size_text


def job_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of jobs that begin with `incomplete`, for shell completion; none if the cluster fails."""
    kubectl = Kubectl(context.params.get("context"), context.params.get("namespace"))
    try:
        return [job.name for job in list_jobs(kubectl) if job.name.startswith(incomplete)]
    except KubectlError:
        return []


JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of an RLHFJob.", autocompletion=job_names)]
Image = Annotated[
    str | None, typer.Option("--image", help="Image, with sh and tar, of the claim's reader pod; default: the job's.")
]
FILES, NO_FILES = ":0", ":4"
"""Directive to kubectl after the completions: FILES lets the shell add file names, NO_FILES does not."""


def exit_code_of(work: Callable[[], None], _debug: bool) -> int:
    """Run `work` and return its exit code; the text of a KubectlError or SpecError goes to stderr."""
    try:
        work()
    except (KubectlError, SpecError) as error:
        print_errors([f"error: {line}" for line in str(error).splitlines()])
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.SIGINT)
    return int(ExitCode.OK)


ABOUT = "Show and steer the RLHFJobs of a Kubernetes cluster, and copy their output."
program = Program("kubectl-rlhf", ABOUT, exit_code_of, add_completion=False)
app, command = program.app, program.command


@command("kubectl rlhf top -A")
def top(
    namespace: Namespace = None,
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Show jobs of all namespaces.")] = False,
    once: Once = False,
    context: Context = None,
) -> None:
    """Show the state of jobs, anew every two seconds: phase, step, reward or loss, speed, time left, checkpoint."""
    kubectl = Kubectl(context, namespace)
    nothing = "no RLHFJob in any namespace" if everywhere else f"no RLHFJob in namespace {kubectl.namespace}"
    show(
        lambda: [line_of(job, everywhere=everywhere) for job in list_jobs(kubectl, everywhere=everywhere)],
        nothing,
        once=once,
        passing=KubectlError,
    )


@command("kubectl rlhf why helpful-ppo")
def why(job: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Say what a job waits for, since when and what to do; for a failed job, what failed and where."""
    from rlhf_kubectl.follow import print_why

    kubectl = Kubectl(context, namespace)
    print_why(kubectl, find_job(kubectl, job))


@command("kubectl rlhf compare helpful-ppo helpful-grpo")
def compare(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Names of RLHFJobs.", autocompletion=job_names)],
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Show jobs side by side: steps, GPU hours and cost, the last values of metrics, and the settings that differ."""
    from rlhf_kubectl.compare import table

    if len(jobs) < 2:
        raise KubectlError("name two jobs or more", ExitCode.SPEC)
    kubectl = Kubectl(context, namespace)
    Console(highlight=False).print(table([find_job(kubectl, job) for job in jobs], datetime.now(UTC)))


@command("kubectl rlhf lineage helpful-ppo")
def lineage(
    model: Annotated[str, typer.Argument(metavar="JOB|URI", help="Name of an RLHFJob, or URI of its output.")],
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Show what a job's model was made from, and which jobs have read it, from the statuses of jobs."""
    from rlhf_kubectl.lineage import WIDTH, tree

    Console(highlight=False, width=WIDTH).print(tree(list_jobs(Kubectl(context, namespace)), model), soft_wrap=True)


@command("kubectl rlhf logs helpful-ppo --follow")
def logs(
    job: JobName,
    follow: Follow = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Number of the attempt; default: the latest.")] = None,
    image: Image = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Show the trainer's log of the running attempt, or of an earlier attempt from the job's claim."""
    from rlhf_kubectl.follow import ClusterJob

    ClusterJob(job, namespace=namespace, context=context).logs(attempt, follow=follow, image=image)


@command("kubectl rlhf suspend helpful-ppo")
def suspend(job: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Have a job save a checkpoint and give its slots back."""
    _set_suspend(Kubectl(context, namespace), job, suspended=True)


@command("kubectl rlhf resume helpful-ppo")
def resume(job: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Have a suspended job go on."""
    _set_suspend(Kubectl(context, namespace), job, suspended=False)


def _set_suspend(kubectl: Kubectl, name: str, *, suspended: bool) -> None:
    job = find_job(kubectl, name)
    if job.status.phase in ENDED_PHASES:
        raise KubectlError(f"{name} has ended, it is {job.status.phase}", ExitCode.SPEC)
    is_paused = job.is_paused and not suspended
    if bool(job.spec.get("suspend")) == suspended and not is_paused:
        typer.echo(f"{name} is {'suspended' if suspended else 'not suspended'} already; nothing was changed")
        return
    for value in (True, False) if is_paused else (suspended,):  # a paused job goes on when its spec changes
        options = ["--type=merge", f"--patch={json.dumps({'spec': {'suspend': value}})}"]
        kubectl.run("patch", "rlhfjobs.rlhf.hybridflow.io", name, f"--namespace={job.namespace}", *options)
    then = f"it goes on{' from its checkpoint' if job.status.checkpoint else ''}"
    if suspended:
        then = "its pods, if it has any, end; a trainer that has made steps saves a checkpoint first"
    typer.echo(f"{name}: {then}; kubectl rlhf why {name} says how far that is")


@command("kubectl rlhf save-now helpful-ppo")
def save_now(job: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Have a running job save a checkpoint after its current step; wait until it is saved."""
    kubectl = Kubectl(context, namespace)
    found = find_job(kubectl, job)
    head = head_of(found, pods_of(kubectl, found))
    if head is None or head.phase != "Running" or found.status.phase in ENDED_PHASES:
        message = f"{job} has no head pod that runs, it is {found.status.phase}; kubectl rlhf why {job}"
        raise KubectlError(message, ExitCode.SPEC)
    words = (head.name, f"--container={names.HEAD_CONTAINER}", "--", "rlhf", "save-now", names.OUTPUT_FOLDER)
    kubectl.stream("exec", f"--namespace={found.namespace}", *words)


@command("kubectl rlhf plan job.yaml")
def plan(
    what: Annotated[str, typer.Argument(metavar="FILE|JOB", help="Manifest, or name of an RLHFJob.")],
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Say where the models of a job would live on the nodes that this cluster has now."""
    from rlhf_kubectl.plan import plan as print_plan  # the mapper: half a second that the others do not need

    if without := print_plan(Kubectl(context, namespace), what):
        raise KubectlError(f"there is no place for {', '.join(without)}")


@command("kubectl rlhf tune job.yaml --vary training.seed=1,2,3 --measure evaluation/reward --budget 300")
def tune(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Manifest with one or more RLHFJob documents.")],
    vary: Vary,
    measure: Measure,
    budget: Budget,
    job: TunedJob = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Search values of a job's fields by successive halving; trials are jobs with a label."""
    from rlhf_kubectl.tune import ClusterTuning

    ClusterTuning(Kubectl(context, namespace), file, vary, measure, budget, job).run()


@command("kubectl rlhf fetch helpful-ppo ./model")
def fetch(
    job: JobName,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the model, or the data set.")],
    image: Image = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Copy the output of a job off its claim, by a pod that mounts the claim and is deleted afterwards."""
    from rlhf_kubectl.follow import ClusterJob

    files, size = ClusterJob(job, namespace=namespace, context=context).fetch(folder, image)
    typer.echo(f"{folder}: {files} files, {size_text(size)}")


@command("kubectl rlhf serve helpful-ppo")
def serve(
    job: JobName,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs; default: 1 if the job ran on GPUs.")] = None,
    image: Annotated[str | None, typer.Option("--image", help="Trainer's image; default: the job's.")] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Print the Deployment and the Service that serve a job's model from its claim, by OpenAI's API on port 8000."""
    from rlhf_kubectl.serve import manifests

    kubectl = Kubectl(context, namespace)
    found = find_job(kubectl, job)
    settings = settings_of(kubectl, found.namespace) or Settings()
    documents = manifests(found, settings, image=image, gpus=gpus)
    typer.echo("---\n".join(kubectl_yaml.write(each) for each in documents), nl=False)


@command("kubectl rlhf ui --port 8600")
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page.")] = 8600,
    image: Image = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Show the namespace's jobs in a browser of this machine by `rlhf ui`; pods read the claims of jobs that ended."""
    from rlhf_kubectl.ui import show_jobs

    sys.exit(show_jobs(Kubectl(context, namespace), port=port, image=image))


def main() -> None:
    """Entry point of `kubectl-rlhf`, which kubectl finds on PATH."""
    app(prog_name="kubectl rlhf")


def complete() -> None:
    """Entry point of `kubectl_complete-rlhf`, which kubectl runs for shell completion; prints one completion a line."""
    words = sys.argv[1:]
    line = {"COMP_WORDS": " ".join(["kubectl-rlhf", *words]), "COMP_CWORD": str(len(words))}
    completion_init()  # typer's own shell completion, of which this uses the list for bash
    os.environ.update({"_KUBECTL_RLHF_COMPLETE": "complete_bash", **line})
    try:
        app(prog_name="kubectl-rlhf")
    finally:
        typer.echo(NO_FILES if not words[-1:] or words[-1].startswith("-") or len(words) == 1 else FILES)


if __name__ == "__main__":
    main()
