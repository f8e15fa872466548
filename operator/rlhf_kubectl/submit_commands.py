"""Commands of the program `rlhf` for jobs on a cluster, which it finds by the entry points `rlhf.commands`."""

import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from rlhf_api.problems import Problem, SpecError, suggestion
from rlhf_planning.command_line import Context, Namespace, Program


def declare(program: Program) -> None:
    """Declare the commands."""

    @program.command("rlhf submit job.yaml --wait --logs")
    def submit(
        file: Annotated[Path, typer.Argument(metavar="FILE", help="Manifest with one or more RLHFJob documents.")],
        job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Name of one job; default: all jobs.")] = None,
        wait: Annotated[bool, typer.Option("--wait", help="Say what the jobs do until all have ended.")] = False,
        logs: Annotated[bool, typer.Option("--logs", help="As --wait, and print the trainer's log.")] = False,
        namespace: Namespace = None,
        context: Context = None,
    ) -> None:
        """Check the jobs of a manifest and give them, with the code beside it, to a cluster by kubectl."""
        from rlhf_kubectl.follow import wait_for  # half a second that other commands do not need
        from rlhf_kubectl.kubectl import Kubectl
        from rlhf_kubectl.submit import submit as submit_jobs

        kubectl = Kubectl(context, namespace)
        names = submit_jobs(kubectl, file, job)
        if wait or logs:
            sys.exit(wait_for(kubectl, names, logs=logs))
        typer.echo(f"`kubectl rlhf why {names[-1]}` says what it waits for; `kubectl rlhf top` shows all jobs")

    @program.command("rlhf profile gke")
    def profile(
        platform: Annotated[str, typer.Argument(metavar="gke|eks|aks|openshift|kind", help="Kind of cluster.")],
    ) -> None:
        """Print values of the chart for a platform, with the reasons and their sources."""
        profiles = {Path(each.name).stem: each for each in (files(__package__) / "profiles").iterdir()}
        if platform not in profiles:
            raise SpecError([Problem("PLATFORM", f"is {platform}; {suggestion(platform, sorted(profiles))}")])
        typer.echo(profiles[platform].read_text(), nl=False)
