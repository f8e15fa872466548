"""Mistakes in a manifest, each with the path of the wrong field and a sentence about the mistake."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, Final

from rlhf_api.exit_codes import ExitCode

MAX_TEXT: Final = 2000


@dataclass(frozen=True)
class Problem:
    """One mistake in a manifest: the path of the field, and a sentence."""

    path: str
    message: str

    def __str__(self) -> str:
        return printable(f"{self.path}: {self.message}")

    def within(self, prefix: str) -> "Problem":
        return Problem(prefix + self.path, self.message)


class SpecError(ValueError):
    """Error with every mistake found in a spec; its text has one line for each."""

    exit_code: ClassVar[ExitCode] = ExitCode.SPEC

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))


def choice(names: Iterable[str]) -> str:
    """Return names as words: `a, b or c`."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def suggestion(wrong: str, names: Iterable[str]) -> str:
    """Return a hint for the unknown name `wrong`: the nearest known name as a question, else all known names."""
    known = sorted(names)
    near = [name for name in known if name.lower() == wrong.lower()] or get_close_matches(wrong, known, n=1)
    return f"did you mean {near[0]}?" if near else f"expected {choice(known)}" if known else "there is none"


def printable(text: str) -> str:
    """Return a text on one line, with spaces in place of unprintable characters."""
    return "".join(each if each.isprintable() else " " for each in text)


def legible(value: Any, most: int = MAX_TEXT) -> Any:
    """Return a JSON value with its texts, perhaps of user code, cut to `most` characters, with surrogates escaped."""
    if isinstance(value, dict):
        return {key: legible(each, most) for key, each in value.items()}
    if isinstance(value, list):
        return [legible(each, most) for each in value]
    return value[:most].encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def one_line(text: str, most: int) -> str:
    """Return another program's text as one printable line, without credentials of URLs, of at most `most` bytes."""
    words = printable(text).split()
    return re.sub(r"//[^/\s]*@", "//", " ".join(words)).encode()[:most].decode(errors="ignore")
