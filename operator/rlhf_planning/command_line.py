"""Options and endings that the command lines of `rlhf` and `kubectl rlhf` share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.metadata import version
from typing import Annotated, Any, ParamSpec, TextIO

import typer

P = ParamSpec("P")
ExitCodeOf = Callable[[Callable[[], None], bool], int]
"""Function that runs work, prints its error (with a traceback if the flag is set) and returns an exit code."""
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")]
Once = Annotated[bool, typer.Option("--once", help="Print it once, as where stdout is no terminal.")]


def version_option(program: str) -> Any:
    """Return the option --version, which prints the version of the distribution and ends."""

    def show(is_set: bool) -> None:
        if is_set:
            typer.echo(f"{program} {version('rlhf-operator')}")
            raise typer.Exit

    return typer.Option("--version", callback=show, is_eager=True, help="Show the version.")


def exits_by(exit_code_of: ExitCodeOf) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator of commands that ends the process with the exit code of the command's error."""

    def exits(command: Callable[P, None]) -> Callable[P, None]:
        @wraps(command)
        def run_and_exit(*arguments: P.args, **options: P.kwargs) -> None:
            sys.exit(exit_code_of(lambda: command(*arguments, **options), bool(options.get("debug"))))

        return run_and_exit

    return exits


def print_errors(lines: Sequence[str]) -> None:
    """Print lines to stderr; silence stderr if its reader is gone, as after a terminal was closed."""
    try:
        for line in lines:
            typer.echo(line, err=True)
    except OSError:
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Redirect a stream whose reader is gone to the null device, also for the end of the program."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 a device
        os.dup2(nowhere.fileno(), stream.fileno())
