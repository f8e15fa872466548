"""Code of the user's that a manifest names by an entry point, `module:name`: where it is looked for, and its lines.

All of it is found in one way: what Python finds by itself (installed, in the image, on PYTHONPATH), then the folder of
the manifest, then the current one.
"""

import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from types import CodeType
from typing import ClassVar

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
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if package_of(str(frame.f_globals.get("__name__"))) in packages
    ]
    return " ({}:{})".format(*frames[-1]) if frames else ""


def defined_at(function: object) -> str:
    """` (file:line)` of where a function begins; empty for what is no function of Python."""
    code = getattr(function, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if isinstance(code, CodeType) else ""


def said(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}"
