"""Count of other projects' scripts that `rlhf import` makes valid manifests of. Refusals are counted by kind.

Usage: python -m tests.foreign.scripts.count FOLDER... [--names]   # folders with copies of their repositories

Counted are shell scripts, YAML files with a model, and the shell blocks of pages and docstrings, if they call a program
that is read. Nothing of them is run. `--names` adds the file of each refusal.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_importers.command import convert
from rlhf_importers.shell import ConversionError

TRAINERS = "sft|dpo|grpo|rloo|kto|reward|reward_modeling"
PROGRAMS = {
    "verl": r"\bmain_ppo\b",
    "openrlhf": r"openrlhf\.cli\.train_(?:ppo_ray|sft|rm|dpo)\b",
    "trl": rf"(?:^|\s)(?:trl\s+|\S*(?:scripts|open_r1)/)(?:{TRAINERS})\b(?![^;]*--config)|^model_name_or_path:",
}
"""Project -> pattern of what a text of it calls or sets; a call that reads a file of options is left to the file."""
BLOCK = re.compile(r"^([ \t]*)```(?:bash|sh|shell)\n(.*?)^\s*```", re.DOTALL | re.MULTILINE)
VALID = "valid"


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each script, configuration and shell block in a folder."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        if file.suffix not in {".sh", ".slurm", ".yaml", ".yml", ".md", ".mdx", ".py"}:
            continue
        text, name = file.read_text(errors="replace"), str(file.relative_to(folder))
        if file.suffix in {".md", ".mdx", ".py"}:
            for number, (indent, block) in enumerate(BLOCK.findall(text), 1):
                yield f"{name}#{number}", re.sub(rf"^{indent}", "", block, flags=re.MULTILINE)
        else:
            yield name, text


def project_of(text: str) -> str | None:
    """Return the project whose program a text calls outside of its comments."""
    code = re.sub(r"(?:^|\s)#.*", "", text)
    return next((name for name, called in PROGRAMS.items() if re.search(called, code, re.MULTILINE)), None)


def outcome(name: str, text: str, project: str) -> str:
    """Return VALID, or the kind of refusal: its first sentence without names of files, numbers and quoted text."""
    try:
        Job.parse(convert(text, project, source=name).document())
    except (ConversionError, SpecError) as error:
        sentence = str(error).split("\n")[0].removeprefix(f"{name}: ")
        return re.sub(r"'[^']*'|\"[^\"]*\"|\b\d[\d.,e-]*", "…", sentence)
    return VALID


def count(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Return the names of the texts of a folder by project, and whether they stand in pages, and by outcome."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, text in texts(folder):
        if project := project_of(text):
            found[project + " in pages" * ("#" in name)][outcome(name, text, project)].append(name)
    return found


def main(arguments: list[str]) -> None:
    """Print a line for each project of each folder, and one for each kind of refusal."""
    for folder in (Path(each) for each in arguments if not each.startswith("--")):
        for project, outcomes in count(folder).items():
            kinds = Counter({kind: len(names) for kind, names in outcomes.items()})
            share = kinds[VALID] / kinds.total()
            print(f"{folder.name} {project}: {kinds[VALID]} of {kinds.total()} valid ({share:.0%})")
            for kind, number in kinds.most_common():
                if kind != VALID:
                    print(f"  {number:4d}  {kind}")
                    print(
                        "".join(f"          {name}\n" for name in outcomes[kind]) if "--names" in arguments else "",
                        end="",
                    )


if __name__ == "__main__":
    main(sys.argv[1:])
