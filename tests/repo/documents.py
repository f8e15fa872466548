"""What a Markdown page names: files, folders, modules, identifiers, commands and links."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.repo.tree import PARTS, ROOT, tracked_files

SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<![\w/.<>*…-])(?:[\w.-]+/)*[\w-][\w.-]*\.(?:[a-z]+)\b(?![*/])")
FOLDER = re.compile(r"(?:[\w.-]+/)+")
MODULE = re.compile(r"\b(?:rlhf_\w+|tests|benchmarks)(?:\.\w+)+")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SEVERAL_WORDS = re.compile(r"[a-z][A-Z]|[A-Za-z0-9]_[A-Za-z]")
"""Marks an identifier that is no ordinary word: snake_case, camelCase or CamelCase."""
OURS = {".py", ".md"}
"""Kinds of files that only the repository has; a run folder holds others."""
ROOTS = {path.parent.name: path.parents[1].name for part in PARTS for path in (ROOT / part).glob("rlhf_*/__init__.py")}
"""package -> the folder that it lies in."""


class Line(NamedTuple):
    """A line of a page: where it is, what it says, and the parts of it that are code."""

    place: str
    text: str
    code: tuple[str, ...]


def lines(page: str, text: str) -> Iterator[Line]:
    """The lines of a page. Code is what stands in backquotes, is indented by four columns or is fenced."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        block = not fence and (fenced or line.startswith("    "))
        yield Line(f"{page}:{number}", line, (line.strip(),) if block else tuple(SPAN.findall(line)))


def commands(page: list[Line]) -> Iterator[tuple[str, str]]:
    """(place, command) of the code of a page; a line that ends with a backslash goes on in the next one."""
    begun = ""
    for line in page:
        for code in line.code:
            command = begun + code
            begun = command[:-1] if command.endswith("\\") else ""
            if not begun:
                yield line.place, command


@cache
def tracked() -> frozenset[str]:
    """Every tracked file and folder, relative to the repository."""
    files = [path.relative_to(ROOT) for path in tracked_files()]
    return frozenset(str(path) for file in files for path in (file, *file.parents)) - {"."}


@cache
def endings() -> frozenset[str]:
    """Every tracked path and what is left of it without its first folders: `a/b/c`, `b/c`, `c`."""
    return frozenset("/".join(parts[n:]) for path in tracked() if (parts := path.split("/")) for n in range(len(parts)))


@cache
def words() -> frozenset[str]:
    """Every identifier of the repository's files, pages of text and lists of hashes aside."""
    texts = (_text(path) for path in tracked_files() if path.suffix not in {".md", ".jsonl", ".sum", ".lock"})
    return frozenset(IDENTIFIER.findall("\n".join(texts)))


@cache
def flags() -> frozenset[str]:
    """Every `--flag` that a file other than a page mentions."""
    texts = (_text(path) for path in tracked_files() if path.suffix != ".md" and path.parent.name != "repo")
    return frozenset(re.findall(r"--[a-z][\w-]*", "\n".join(texts)))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""


def exists(path: str) -> bool:
    """Whether the repository holds a file or folder; a path may leave out its first folders."""
    path = path.rstrip("/")
    return path in (tracked() if path.split("/")[0] in tracked() else endings())


def floors(page: list[Line]) -> Iterator[tuple[str, str]]:
    """(place, path) of each module and folder in a drawing of the tree: a package, and indented what it holds."""
    above: list[str] = []
    for line in page:
        drawn = re.fullmatch(r" {4}((?:  ){0,2})(\w[\w/]*(?: \w[\w/]*)*)(?:  .*)?", line.text)
        if not drawn:
            above = above if line.code else []
            continue
        depth = len(drawn[1]) // 2
        if above if depth else drawn[2] in ROOTS:
            above = [*above[:depth], drawn[2].split()[0].rstrip("/")]
            yield from (
                (line.place, "/".join([*above[:depth], name])) for name in drawn[2].split() if above[0] in ROOTS
            )


def missing_paths(line: Line) -> Iterator[str]:
    """The files and folders of this repository that a line names and that are not there."""
    for name in FILE.findall(LINK.sub("]", line.text)):
        if (Path(name).suffix in OURS or name.split("/")[0] in tracked()) and not exists(name):
            yield name
    for code in line.code:
        if (FOLDER.fullmatch(code) or code.split("/")[0] in tracked()) and " " not in code and not exists(code):
            yield code


def missing_modules(line: Line) -> Iterator[str]:
    """The dotted names that lead to no module, or to something that its module does not mention."""
    for code in line.code:
        yield from (name for name in MODULE.findall(code) if not module_exists(name))


def module_exists(name: str) -> bool:
    """Whether a dotted name is a module, a package, or something that is named in one."""
    first, *rest = name.split(".")
    place = ROOT / ROOTS.get(first, "") / first
    for part in rest:
        if place.with_suffix(".py").is_file():
            return part in IDENTIFIER.findall(place.with_suffix(".py").read_text())
        place /= part
    return place.is_dir() or place.with_suffix(".py").is_file() or _in_package(place)


def _in_package(place: Path) -> bool:
    package = place.parent / "__init__.py"
    return package.is_file() and place.name in IDENTIFIER.findall(package.read_text())


def missing_identifiers(line: Line) -> Iterator[str]:
    """The identifiers in code that no file of the repository mentions."""
    for code in line.code:
        for name in IDENTIFIER.findall(FILE.sub("", code)):
            if SEVERAL_WORDS.search(name) and name not in words():
                yield name


def anchors(text: str) -> set[str]:
    """The anchors of a page: its heads as GitHub writes them in links."""
    heads = (line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(page: Path, line: Line) -> Iterator[str]:
    """The links of a line that lead to no file, or to no head of one."""
    for target in LINK.findall(line.text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            yield target
