"""Shell scripts of other projects: the words of a script's call of a program, flags and values."""

import re
from collections.abc import Callable
from itertools import chain
from typing import Any

from rlhf_api.checks.resume import leaves
from rlhf_api.kubectl_yaml import read
from rlhf_api.problems import SpecError
from rlhf_importers.bash import Script
from rlhf_importers.scalars import scalar

OPTION = re.compile(r"--[A-Za-z]|\+{0,2}\w+[\w.]*\.\w+=")


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


def call(text: str, source: str, program: str) -> tuple[list[str], list[str]]:
    """Return the words of a script's last call of a program, from its name on, and sentences on what was guessed.

    `program` is a pattern of the name. All words of the script are returned if it has no such call.
    """
    script, is_named = Script(source), re.compile(program).fullmatch
    for each in _scripts_within(text, program) or [text]:
        script.read(each)
    if not (calls := _calls_of(script, is_named)):
        return list(chain.from_iterable(script.commands)), list(dict.fromkeys(script.notes))
    if len(calls) > 1:
        script.notes.append(f"the script starts {len(calls)} trainings; the last one is read")
    lost = [words[0] for words in script.commands if words not in calls and OPTION.match(words[0])]
    script.notes += [f"{word} is no part of a command: a comment or an empty line ends the call" for word in lost]
    begin = next(place for place, word in enumerate(calls[-1]) if is_named(word))
    return calls[-1][begin:], list(dict.fromkeys(script.notes))


def _calls_of(script: Script, is_named: Callable[[str], object]) -> list[list[str]]:
    """Return the commands that name a program (`is_named`); if none does, those in quotes or in branches not taken."""
    searches: tuple[Callable[[], object], ...] = (list, lambda: script.read_quoted(is_named), script.read_skipped)
    for search in searches:
        search()
        calls = [words for words in script.commands if any(map(is_named, words))]
        if calls:
            return calls
    return []


def _scripts_within(text: str, program: str) -> list[str]:
    """Return the texts of a YAML document that call a program, such as the steps of a workflow."""
    try:
        documents = [document for document in read(text, "") if isinstance(document, dict)]
    except SpecError:
        return []
    return [part for _, part in leaves(documents) if isinstance(part, str) and re.search(program, part)]
