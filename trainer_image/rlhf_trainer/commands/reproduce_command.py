"""Declaration of `rlhf reproduce`; the work is in `run.reproduce`, whose imports take time."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_planning.command_line import Program


def declare(program: Program) -> None:
    """Declare the command `rlhf reproduce`."""

    @program.command("rlhf reproduce runs/first --job helpful-ppo --steps 3")
    def reproduce(
        run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder, which is only read.")],
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
