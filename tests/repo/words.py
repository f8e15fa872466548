"""The check of the house's words: `python -m tests.repo.words`, part of `make lint`.

It reads the docstrings of the product and the subjects of the commits since FIRST_COMMIT. A docstring may not begin
with a fragment. A sentence may not be a chain of pronouns or run on. A subject is imperative and names its part.

`python -m tests.repo.words --draw 120 --seed 1 [--places]` prints docstrings drawn at random, for a reader who has not
seen the code; --places adds file and line, for whoever compares the reader's answers with the code.
"""

import argparse
import ast
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.repo.tree import ROOT

ROOMS = ("crds", "operator", "trainer_image")
FIRST_COMMIT = "20df8ccec87efe9018d3ed8884d17961a464bcca"
"""The last commit before the rules of subjects."""
MAX_FRAGMENT_SHARE, MAX_PRONOUNS, MAX_WORDS, MAX_SUBJECT = 0.01, 3, 30, 72
PRONOUNS_COUNT_BELOW = 45
"""Words of a sentence from which it is an enumeration, in which pronouns may repeat."""
FRAGMENT = re.compile(
    r"(Of|What|Those|That|The same|As|Another|Such|So|In which|By|For|On|From|Whose|Which|To whom|With|Where|When|If it"
    r"|Until|Its?|They|Also|Beside|Else|All of|Whether (it|they|that|this|those)|Whoever|Whatever)\b"
)
PRONOUN = re.compile(
    r"\b(what|that|which|those|it|its|them|they|their|whose|such|one|ones|another|others)\b", re.IGNORECASE
)
SENTENCE_END, CODE = re.compile(r"(?<=[.;:?!])\s"), re.compile(r"`[^`]*`")
SUBJECT = re.compile(r"[a-z][a-z0-9 ._/,&-]*: [a-z`]")
NOT_IMPERATIVE = re.compile(r": (\w+(ed|ing)|the|a|an|no|what|how|why|is|are|it|they|there)\b")
FRAGMENTS, PRONOUNS, LENGTHS, SUBJECTS = "fragments", "pronoun chains", "long sentences", "subjects"


@dataclass(frozen=True)
class Fault:
    """A text that breaks a rule: its place, the rule and the text."""

    place: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: {self.text[:100]}"


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a module, also of those below assignments."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, " ".join(value.value.split())


def broken_rules(text: str) -> Iterator[str]:
    """The rules that a docstring breaks, once for each sentence that does."""
    if FRAGMENT.match(text):
        yield FRAGMENTS
    for sentence in SENTENCE_END.split(CODE.sub("X", text)):
        words = len(sentence.split())
        if words > MAX_WORDS:
            yield LENGTHS
        if words < PRONOUNS_COUNT_BELOW and len(PRONOUN.findall(sentence)) > MAX_PRONOUNS:
            yield PRONOUNS


def faults_of_docstrings(root: Path = ROOT) -> tuple[list[Fault], int]:
    """Return the faults of all docstrings of the product, and the number of docstrings."""
    texts = list(product_docstrings(root))
    return [Fault(place, rule, text) for place, text in texts for rule in broken_rules(text)], len(texts)


def product_docstrings(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Place, `file:line`, and text of each docstring of the product."""
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        for line, text in docstrings(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(root)}:{line}", text


def draw(count: int, seed: int) -> list[tuple[str, str]]:
    """Place and text of `count` docstrings, drawn by the seed."""
    return random.Random(seed).sample(list(product_docstrings()), count)


def is_good_subject(subject: str) -> bool:
    """Whether a commit's subject has a part, a verb in the imperative and at most MAX_SUBJECT characters."""
    fits = len(subject) <= MAX_SUBJECT and SUBJECT.match(subject) is not None
    return fits and not NOT_IMPERATIVE.search(subject)


def faults_of_subjects() -> list[Fault]:
    """Commits since FIRST_COMMIT with a wrong subject; none where the history is not there."""
    command = ["git", "log", "--no-merges", "--format=%h %s", f"{FIRST_COMMIT}..HEAD"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    commits = [line.partition(" ") for line in listed.splitlines()]
    return [Fault(commit, SUBJECTS, subject) for commit, _, subject in commits if not is_good_subject(subject)]


def is_over(counts: Counter[str], docstrings_read: int) -> bool:
    """Whether the faults are more than the rules allow: a share of fragments, and none of any other kind."""
    allowed = {FRAGMENTS: int(MAX_FRAGMENT_SHARE * docstrings_read)}
    return any(number > allowed.get(rule, 0) for rule, number in counts.items())


def main() -> int:
    """Print each fault and the counts; return 1 if the faults are more than the rules allow. Or print a draw."""
    parser = argparse.ArgumentParser(prog="python -m tests.repo.words")
    parser.add_argument("--draw", type=int, help="print so many docstrings instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--places", action="store_true", help="print file and line of each")
    options = parser.parse_args()
    if options.draw:
        for number, (place, text) in enumerate(draw(options.draw, options.seed), start=1):
            print(f"{number}. {f'[{place}] ' if options.places else ''}{text}")
        return 0
    faults, count = faults_of_docstrings()
    faults += faults_of_subjects()
    counts = Counter(fault.rule for fault in faults)
    is_red = is_over(counts, count)
    if is_red:
        print(*faults, sep="\n", file=sys.stderr)
    found = ", ".join(f"{rule} {number}" for rule, number in counts.most_common()) or "no fault"
    print(f"words: {count} docstrings, {found}")
    return int(is_red)


if __name__ == "__main__":
    raise SystemExit(main())
