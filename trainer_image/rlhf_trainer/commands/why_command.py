"""Declaration of `rlhf why`; the work is in `why`, whose imports take time that other commands do not need."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_planning.command_line import Program


def declare(program: Program) -> None:
    """Declare the command `rlhf why`."""

    @program.command("rlhf why runs/first --job helpful-ppo")
    def why(
        run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder: the --output of `rlhf run`.")],
        job: Annotated[str | None, typer.Option(metavar="NAME", help="Only this job.")] = None,
        step: Annotated[int | None, typer.Option(min=1, metavar="N", help="Look at the first N steps only.")] = None,
        against: Annotated[
            Path | None, typer.Option(metavar="RUN_DIR", help="Run to compare with; default: the last healthy one.")
        ] = None,
        in_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Say why a run went as it did: where it changed, likely causes, rows, and what to try."""
        from rlhf_trainer.commands.why import print_why  # numpy: time that `validate` does not need

        print_why(run_dir, only=job, last=step, against=against, in_json=in_json)
