"""Count of other projects' scripts that `rlhf import` makes valid manifests of. Refusals are counted by kind.

Usage: python -m tests.foreign.scripts.count FOLDER... [--names]

A FOLDER holds a copy of a repository; nothing of it is run. `--names` adds the file of each refusal.

Counted are shell scripts, YAML files, and the shell blocks of pages and docstrings, if they call a program that is
read. A fragment is left out: it holds the word `...`, or lacks its model, its data or, in RL with TRL, a reward.
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

TRAINERS = "sft|dpo|grpo|rloo|kto|reward|reward_modeling"
PROGRAMS = {
    "verl": r"-m\s+\S*\bmain_ppo\b|\bmain_ppo\.py\s",
    "openrlhf": r"openrlhf\.cli\.train_(?:ppo_ray|sft|rm|dpo)\b",
    "trl": rf"(?:^|\s)(?:trl\s+|\S*(?:scripts|open_r1)/)(?:{TRAINERS})\b(?![^;]*--config)|^model_name_or_path:",
}
"""Project -> pattern of what a text of it calls or sets; a call that reads a file of options is left to the file."""
NEEDED = {
    "verl": (r"\bmodel\.path=", r"\btrain_files="),
    "openrlhf": (r"model_name_or_path|pretrain\b", r"\bdata(?:set|\.\w*dataset)|prompt_data\b"),
    "trl": (r"model_name_or_path", r"\bdataset", r"\breward|\A(?!.*\b(?:grpo|rloo)\b)"),
}
"""Project -> patterns that a whole example of it has."""
BLOCK = re.compile(r"^([ \t]*)```(?:bash|sh|shell)\n(.*?)^\s*```", re.DOTALL | re.MULTILINE)
VALID, FRAGMENT = "valid", "fragment"


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


def is_fragment(text: str, project: str) -> bool:
    """Whether a text of a project is no whole example, which the project itself could not run."""
    return "..." in text.split() or not all(re.search(each, text, re.DOTALL) for each in NEEDED[project])


def outcome(name: str, text: str, project: str) -> str:
    """Return VALID, FRAGMENT, or the kind of refusal: its first sentence without files, numbers and quoted text."""
    if is_fragment(text, project):
        return FRAGMENT
    lost: dict[str, str] = {}
    try:
        draft = convert(text, project, source=name)
        lost = draft.lost
        Job.parse(draft.document())
    except SpecError as error:
        untold = [why for why in lost.values() if why.startswith("only a run")] if "missing" in str(error) else []
        sentence = f"{error}".split("\n")[0] + "; a value of the script is told by a run only" * bool(untold)
    else:
        return VALID
    return re.sub(r"'[^']*'|\"[^\"]*\"|\b\d[\d.,e-]*", "…", sentence.split("\n")[0].removeprefix(f"{name}: "))


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
            left_out, examples = kinds.pop(FRAGMENT, 0), kinds.total()
            share = f" ({kinds[VALID] / examples:.0%})" if examples else ""
            print(f"{folder.name} {project}: {kinds[VALID]} of {examples} valid{share}, {left_out} fragments left out")
            for kind, number in kinds.most_common():
                if kind != VALID:
                    print(f"  {number:4d}  {kind}")
                    names = outcomes[kind] if "--names" in arguments else []
                    print("".join(f"          {name}\n" for name in names), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
