"""Declaration of `rlhf ui`; the work is in `ui`, whose imports take time that other commands do not need."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_planning.command_line import Program


def declare(program: Program) -> None:
    """Declare the command `rlhf ui`."""

    @program.command("rlhf ui runs --port 8600")
    def ui(
        folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Folder with run folders.")] = Path("runs"),
        port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page.")] = 8600,
    ) -> None:
        """Show the runs below a folder in a browser of this machine: list, live curves, rollouts, comparisons."""
        from rlhf_trainer.commands.ui import serve_runs  # aiohttp and matplotlib: a second

        serve_runs(folder, port)
