"""User code that a manifest names by an entry point, `module:name`: its search path, and its lines in messages.

Modules are searched where Python finds them itself (installed, in the image, on PYTHONPATH), then in the manifest's
folder, then in the current folder.
"""

import inspect
import sys
import traceback
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from rlhf_api.exit_codes import ExitCode


class OwnCodeError(Exception):
    """Error for user code that is missing or does not work; one sentence with its file and line."""

    exit_code: ClassVar[ExitCode] = ExitCode.USER_CODE


def add_search_path(folder: Path) -> None:
    """Append this folder and the current folder to the folders in which Python searches modules."""
    for each in (folder, Path()):
        if (path := str(each.resolve())) not in sys.path:
            sys.path.append(path)


def package_of(module: str) -> str:
    """Return the outermost package of a module's dotted name."""
    return module.partition(".")[0]


def line_of(error: BaseException, packages: Collection[str]) -> str:
    """Return ` (file:line)` of an error's innermost traceback line that is in one of the packages; else empty."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if package_of(str(frame.f_globals.get("__name__"))) in packages
    ]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno or 0))
    in_files = [frame for frame in frames if not frame[0].startswith("<")]  # not text that was evaluated
    return " ({}:{})".format(*in_files[-1]) if in_files else ""


def defined_at(what: object) -> str:
    """Return ` (file:line)` of the start of a function or class, ` (file)` of a module; empty without source."""
    found: Any = what
    with suppress(OSError, TypeError, ValueError):  # ValueError: an object with every attribute, also `__wrapped__`
        line = "" if isinstance(found, ModuleType) else f":{inspect.getsourcelines(found)[1]}"
        return f" ({inspect.getsourcefile(inspect.unwrap(found))}{line})"
    return ""


def describe_error(error: BaseException) -> str:
    """Return an exception as one line: its class and its text."""
    # The text of a SyntaxError ends with the name of the file, without its folder.
    told = error.msg if isinstance(error, SyntaxError) and error.filename else error
    text = " ".join(str(told).split())
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}"
