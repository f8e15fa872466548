"""Reader of shell scripts as words, with variables replaced by their values; nothing is run. It reads YAML, too."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from typing import Any, ClassVar

from rlhf_api.exit_codes import ExitCode
from rlhf_api.kubectl_yaml import read
from rlhf_api.problems import Problem, SpecError

VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\}|\{(\w+)\[[@*]\]\})")
ASSIGNED = re.compile(r"(?:export +)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
HERE_DOCUMENT = re.compile(r"read [^\n]*?(\w+)\s*<<-?\s*['\"]?(\w+)['\"]?\n(.*?)^\s*\2\s*$", re.DOTALL | re.MULTILINE)


class ConversionError(Exception):
    """Error for a configuration that cannot be read or becomes no valid manifest; its text is one sentence per line."""

    exit_code: ClassVar[ExitCode] = ExitCode.SPEC


def words(script: str, source: str) -> list[str]:
    """Return the words of all commands of a script, in order. ConversionError if a quote is not closed."""
    script = HERE_DOCUMENT.sub(lambda found: f"{found[1]}=({found[3]})", script.replace("\\\n", " "))
    known: dict[str, str] = {}
    found: list[str] = []
    for line in _statements(script):
        assigned = ASSIGNED.fullmatch(line.strip())
        try:
            if assigned and "." not in assigned[1]:
                known[assigned[1]] = " ".join(_split(assigned[2].strip().removeprefix("(").removesuffix(")"), known))
            else:
                found += _split(line, known)
        except ValueError as error:
            raise ConversionError(
                f"{source}: cannot be read as a shell script: {error} in {line.strip()[:60]!r}"
            ) from None
    return found


def _statements(script: str) -> Iterator[str]:
    """Yield the lines of a script without comments; an array of several lines becomes one line."""
    gathered: list[str] = []
    for line in script.splitlines():
        bare = re.sub(r"(^|\s)#.*", "", line).rstrip()
        gathered.append(bare)
        begins = re.match(r"\s*\w+=\(", gathered[0])
        if not begins or bare.endswith(")"):
            yield " ".join(gathered)
            gathered = []
    yield " ".join(gathered)


def _split(text: str, known: dict[str, str]) -> list[str]:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2] or found[4]
        return known.get(name, os.environ.get(name, found[3] or found[0]))

    return shlex.split(VARIABLE.sub(value, text))


def only_document(text: str, source: str) -> Any:
    """Return the only document of a YAML text; None for an empty text. SpecError for bad YAML or several documents."""
    documents = read(text, f"{source}: ")
    if len(documents) > 1:
        raise SpecError([Problem(source, f"holds {len(documents)} YAML documents, expected one")])
    return documents[0] if documents else None


def scalar(text: str) -> Any:
    """Return a word of a script as YAML reads it: a number, a boolean, a list or text."""
    try:
        return read(text, "")[0]
    except (SpecError, IndexError):
        return text


def flags(script: list[str]) -> dict[str, Any]:
    """Return values of flags (`--name value ...`, `--name=value`) by name: True for none, a list for several."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in script:
        if re.match(r"--[A-Za-z]", word):
            name, is_set, value = word[2:].partition("=")
            found[name] = [value] if is_set else []
        elif name:
            found[name].append(word)
    values = {name: [scalar(word) for word in given] for name, given in found.items()}
    return {name: True if not each else each[0] if len(each) == 1 else each for name, each in values.items()}
