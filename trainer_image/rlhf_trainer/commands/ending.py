"""End of a command of `rlhf`: an error becomes a sentence on stderr and the exit code of its kind."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec

import typer

from rlhf_api.exit_codes import ExitCode
from rlhf_trainer.errors import user_error
from rlhf_trainer.outputs.display import silence
from rlhf_trainer.run.stopping import Stopped
from rlhf_trainer.run_folder.attempt import VARIABLE

P = ParamSpec("P")


def exits(command: Callable[P, None]) -> Callable[P, None]:
    """Mark a command that ends the process with the exit code of its error."""

    @wraps(command)
    def run_and_exit(*arguments: P.args, **options: P.kwargs) -> None:
        sys.exit(exit_code_of(lambda: command(*arguments, **options), debug=bool(options.get("debug"))))

    return run_and_exit


def exit_code_of(work: Callable[[], None], *, debug: bool) -> int:
    """Run `work`; an error becomes a sentence on stderr (and a traceback to debug) and the exit code of its kind."""
    return ending(work, debug=debug)[0]


def ending(work: Callable[[], None], *, debug: bool) -> tuple[int, str]:
    """Run `work` and return its exit code and error message; a defect in a pod also prints its traceback."""
    try:
        work()
    except (Exception, Stopped) as raised:  # noqa: BLE001 nothing above could show it to the user
        error = user_error(raised)
        code = getattr(error, "exit_code", None)
        is_defect = code in (None, ExitCode.INTERNAL)
        is_shown = debug or (is_defect and VARIABLE in os.environ)
        shown = traceback.format_exc().splitlines() if is_shown else []
        if code is None:
            first = (str(error).strip().splitlines() or [""])[0]
            hint = "" if is_shown else " (--debug shows the traceback)"
            print_errors([*shown, f"internal error: {type(error).__name__}: {first}{hint}"])
            return int(ExitCode.INTERNAL), f"{type(error).__name__}: {first}"
        lines = str(error).splitlines()
        print_errors([*shown, *(f"error: {line}" for line in lines)])
        return int(code), "; ".join(lines)
    return int(ExitCode.OK), ""


def print_errors(lines: Sequence[str]) -> None:
    """Print lines to stderr, whose reader may be gone, as after a terminal was closed."""
    try:
        for line in lines:
            typer.echo(line, err=True)
    except OSError:
        silence(sys.stderr)
