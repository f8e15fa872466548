"""The measures of the house: `make house` prints each beside its bound.

They are: words (`tests.repo.words`), the way of a job (`tests.repo.walk`), complexity, dynamic attributes and types,
lines by room, words of the docs, and the seconds of the last test runs on this machine.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.repo.complexity import functions_of
from tests.repo.tree import ROOT
from tests.repo.walk import SOURCES, START, product_modules, walk_from
from tests.repo.words import FRAGMENTS, PRONOUNS, SUBJECTS, faults_of_docstrings, faults_of_subjects

MAX_COMPLEXITY, MAX_ANY, MAX_GETATTR, MAX_PRODUCT_LINES, MAX_DOC_WORDS = 12, 12, 2, 61_118, 46_400
MAX_STAYS, MAX_RETURNS = 30, 11
"""Bounds of the counts of `tests.repo.walk`, which were 67 and 42 at first."""
MAX_BENCHMARKS = 17
MAX_TEST_SECONDS, MAX_UNIT_SECONDS = 900, 90
GENERATED = {"api-reference.md", "messages.md", "metrics.md", "operator-metrics.md", "status.md"}
SECONDS_FILE = ROOT / ".pytest_cache" / "seconds"
"""A line for each run of a test target, which the Makefile adds: its name and its seconds."""


def lines_by_room() -> Counter[str]:
    """Lines of Python by package, and below `rlhf_trainer` by folder."""
    lines: Counter[str] = Counter()
    for source in SOURCES:
        for path in (ROOT / source).rglob("*.py"):
            parts = path.relative_to(ROOT / source).parts
            depth = 2 if parts[0] == "rlhf_trainer" and len(parts) > 2 else 1
            lines["/".join(parts[:depth])] += path.read_text(encoding="utf-8").count("\n")
    return lines


def complex_functions() -> list[tuple[int, str]]:
    """Complexity and place of each product function above MAX_COMPLEXITY, the largest first."""
    found = [
        (complexity, f"{path.relative_to(ROOT)}:{line} {name}")
        for source in SOURCES
        for path in (ROOT / source).rglob("*.py")
        for name, line, complexity in functions_of(path.read_text(encoding="utf-8"))
        if complexity > MAX_COMPLEXITY
    ]
    return sorted(found, reverse=True)


def signatures_with_any() -> int:
    """Functions in `run` and `controller` whose signature names `Any`."""
    folders = [ROOT / "trainer_image" / "rlhf_trainer" / room for room in ("run", "controller")]
    functions = [
        node
        for folder in folders
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    signatures = [ast.unparse(each.args) + ast.unparse(each.returns or ast.Constant(None)) for each in functions]
    return sum(bool(re.search(r"\bAny\b", signature)) for signature in signatures)


def dynamic_attributes() -> int:
    """Definitions of `__getattr__` in the product."""
    files = [path for source in SOURCES for path in (ROOT / source).rglob("*.py")]
    return sum(path.read_text(encoding="utf-8").count("def __getattr__") for path in files)


def words_of_docs() -> int:
    """Words of the README and of all pages that are not generated."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages if page.name not in GENERATED)


def seconds_of_tests(file: Path = SECONDS_FILE) -> dict[str, float]:
    """Seconds of the last run of each test target on this machine; empty if there was none."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {name: float(seconds) for name, _, seconds in (line.rpartition(" ") for line in lines)}


def measures() -> Iterator[tuple[str, float, float | None]]:
    """Name, value and upper bound of each measure; None where a measure has no bound."""
    faults, docstrings = faults_of_docstrings()
    counts = Counter(fault.rule for fault in faults)
    yield "docstrings", docstrings, None
    yield "docstrings that begin with a fragment, %", 100 * counts[FRAGMENTS] / docstrings, 1
    yield "chains of pronouns", counts[PRONOUNS], 0
    yield "commit subjects against the rules", len([each for each in faults_of_subjects() if each.rule == SUBJECTS]), 0
    walk = walk_from(product_modules(), *START)
    yield "stays of a job's way", len(walk.stays), MAX_STAYS
    yield "returns of a job's way", walk.returns, MAX_RETURNS
    yield f"functions of complexity above {MAX_COMPLEXITY}", len(complex_functions()), None
    yield "signatures with Any in run and controller", signatures_with_any(), MAX_ANY
    yield "definitions of __getattr__", dynamic_attributes(), MAX_GETATTR
    yield "benchmark files", len(list((ROOT / "benchmarks").glob("*.py"))), MAX_BENCHMARKS
    yield "words of README and docs", words_of_docs(), MAX_DOC_WORDS
    yield "product lines", lines_by_room().total(), MAX_PRODUCT_LINES
    bounds = {"make test": MAX_TEST_SECONDS, "make test-unit": MAX_UNIT_SECONDS}
    for name, seconds in seconds_of_tests().items():
        yield f"seconds of the last {name} here", seconds, bounds.get(name)


def main() -> None:
    """Print the measures, then the lines by room and the complex functions."""
    for name, value, bound in measures():
        limit = "" if bound is None else f"<= {bound:<8g} {'' if value <= bound else 'OVER'}"
        print(f"{name:<52}{value:>10.5g}  {limit}")
    print("\nlines by room")
    for room, lines in lines_by_room().most_common():
        print(f"{lines:>8}  {room}")
    print(f"\nfunctions of complexity above {MAX_COMPLEXITY}")
    for complexity, place in complex_functions():
        print(f"{complexity:>8}  {place}")


if __name__ == "__main__":
    main()
