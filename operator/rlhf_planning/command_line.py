"""Class with which the programs `rlhf` and `kubectl rlhf` each declare their commands, and options that both have."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TextIO

import typer

P = ParamSpec("P")
ExitCodeOf = Callable[[Callable[[], None], bool], int]
"""Function that runs work, prints its error (with a traceback if the flag is set) and returns an exit code."""
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the jobs; default: that of the current context.")
]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig; default: the current one.")]
Once = Annotated[bool, typer.Option("--once", help="Print the table once, as is done where stdout is no terminal.")]
READER_GONE = 141
"""Exit code of a command whose output's reader closed the pipe, as `| head` does: shells report it for SIGPIPE."""


class Program:
    """Command line of a program: its help, its option --version, and its commands."""

    def __init__(self, name: str, about: str, exit_code_of: ExitCodeOf, **settings: Any) -> None:
        """Make a program without commands; settings: keyword arguments of its `typer.Typer`."""
        self.app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, **settings)
        self._exit_code_of = exit_code_of

        def show(is_set: bool) -> None:
            if is_set:
                typer.echo(f"{name} {version('rlhf-operator')}")
                raise typer.Exit

        option = typer.Option(False, "--version", callback=show, is_eager=True, help="Show the version.")

        def main(_version: bool = option) -> None:
            """Do nothing: the function only declares the option --version."""

        self.app.callback(help=about)(main)

    def command(self, example: str, *, name: str | None = None) -> Callable[[Callable[P, None]], Callable[P, None]]:
        """Return a decorator that makes a function a command; the function's error decides the exit code.

        example: end of the command's help. name: name of the command if it differs from the function's.
        """

        def declare(work: Callable[P, None]) -> Callable[P, None]:
            @wraps(work)
            def run_and_exit(*arguments: P.args, **options: P.kwargs) -> None:
                shows_traceback = bool(options.get("debug"))
                sys.exit(
                    self._exit_code_of(lambda: _run_while_read(lambda: work(*arguments, **options)), shows_traceback)
                )

            self.app.command(name, epilog=f"Example: {example}")(run_and_exit)
            return run_and_exit

        return declare


def _run_while_read(work: Callable[[], None]) -> None:
    """Run `work`; if the reader of its output closes the pipe, exit with READER_GONE and without a message."""
    try:
        work()
    except (BrokenPipeError, SystemExit) as left:  # rich makes a SystemExit of a BrokenPipeError
        if not isinstance(left, BrokenPipeError) and not isinstance(left.__context__, BrokenPipeError):
            raise
        silence(sys.stdout)
        sys.exit(READER_GONE)


def print_errors(lines: Sequence[str]) -> None:
    """Print lines to stderr; silence stderr if its reader is gone, as after a terminal was closed."""
    try:
        for line in lines:
            typer.echo(line, err=True)
    except OSError:
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Redirect a stream whose reader is gone to the null device, so that the flush at exit does not fail either."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 a device
        os.dup2(nowhere.fileno(), stream.fileno())


def uri_of(place: str) -> str:
    """Return `place` as a URI; the path of a file or folder becomes a `file://` URI."""
    return place if "://" in place else Path(place).absolute().as_uri()
