"""Code of the user's that a manifest names by an entry point, `module:name`: where it is looked for, and its lines.

All of it is found in one way: what Python finds by itself (installed, in the image, on PYTHONPATH), then the folder of
the manifest, then the current one.
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
    """Code that a manifest names is not there or does not work; one sentence with its file and line."""

    exit_code: ClassVar[ExitCode] = ExitCode.USER_CODE


def importable(folder: Path) -> None:
    """Have Python look for modules in this folder and in the current one, after all other places."""
    for each in (folder, Path()):
        if (path := str(each.resolve())) not in sys.path:
            sys.path.append(path)


def package_of(module: str) -> str:
    """The outermost package of a module."""
    return module.partition(".")[0]


def line_of(error: BaseException, packages: Collection[str]) -> str:
    """` (file:line)` of the innermost line of an error's traceback that is in one of the packages; else empty."""
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
    """` (file:line)` of where a function or a class begins, ` (file)` of a module; empty for what has no source."""
    found: Any = what
    with suppress(OSError, TypeError, ValueError):  # ValueError: what has every attribute wraps itself
        line = "" if isinstance(found, ModuleType) else f":{inspect.getsourcelines(found)[1]}"
        return f" ({inspect.getsourcefile(inspect.unwrap(found))}{line})"
    return ""


def said(error: BaseException) -> str:
    """An error in one line."""
    told: object = error
    if isinstance(error, SyntaxError) and error.filename:
        told = error.msg  # the text ends with the name of the file, without its folder
    text = " ".join(str(told).split())
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}"
