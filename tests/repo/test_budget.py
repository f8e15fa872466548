"""Files, functions, nesting and the names of tests stay small, and no module is a catch-all."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.tree import PARTS, ROOT, product_files

FILE_LINES, FUNCTION_LINES, NESTING = 400, 60, 3
TEST_NAME = 60
"""Characters of the name of a test or of its file."""
CATCH_ALLS = {"utils", "util", "common", "helpers", "helper", "misc"}
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

DEEP = """
def deep():
    if 1:
        for x in y:
            with z:
                while w:
                    pass
"""
FLAT = """
def flat():
    if 1:
        pass
    elif 2:
        pass
    elif 3:
        pass
    elif 4:
        pass
    else:
        for x in y:
            with z:
                pass
"""


def breaches(source: str, name: str) -> Iterator[str]:
    """What is too big in a module's source, one sentence each."""
    lines = source.count("\n")
    if lines > FILE_LINES:
        yield f"{name} has {lines} lines, more than {FILE_LINES}"
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, FUNCTIONS):
            continue
        length = (function.end_lineno or 0) - function.lineno + 1
        if length > FUNCTION_LINES:
            yield f"{name}:{function.lineno} {function.name} has {length} lines, more than {FUNCTION_LINES}"
        if (depth := nesting(function)) > NESTING:
            yield f"{name}:{function.lineno} {function.name} nests {depth} blocks, more than {NESTING}"


def nesting(node: ast.AST) -> int:
    """Blocks within blocks below a node; an elif is no deeper than its if, and an inner function starts anew."""
    return max((_depth(child, node) for child in ast.iter_child_nodes(node)), default=0)


def _depth(node: ast.AST, parent: ast.AST) -> int:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return 0
    is_elif = isinstance(node, ast.If) and isinstance(parent, ast.If) and parent.orelse == [node]
    return nesting(node) + (isinstance(node, BLOCKS) and not is_elif)


def test_files_functions_and_nesting_are_within_budget() -> None:
    files = product_files()
    assert {path.relative_to(ROOT).parts[0] for path in files} == set(PARTS)
    assert not [breach for path in files for breach in breaches(path.read_text(), str(path.relative_to(ROOT)))]


def catch_alls(paths: list[Path]) -> list[Path]:
    """The paths with a name that says nothing about what is inside."""
    return [path for path in paths if CATCH_ALLS & {path.stem, *path.parts}]


def test_no_module_is_a_catch_all() -> None:
    assert not catch_alls([path.relative_to(ROOT) for path in product_files()])


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\n" * (FILE_LINES + 1), "401 lines"),
        ("def long():\n" + "    x = 1\n" * FUNCTION_LINES, "61 lines"),
        (DEEP, "nests 4 blocks"),
    ],
    ids=["file", "function", "nesting"],
)
def test_a_breach_is_found(source: str, complaint: str) -> None:
    (sentence,) = breaches(source, "planted")
    assert complaint in sentence


def test_what_fits_is_no_breach() -> None:
    fits = "def long():\n" + "    x = 1\n" * (FUNCTION_LINES - 1)
    assert not [*breaches(FLAT, "planted"), *breaches(fits, "planted"), *breaches("x = 1\n" * FILE_LINES, "planted")]


def long_names(path: Path, source: str) -> list[str]:
    """The names in a module of tests that are longer than TEST_NAME, its own with them."""
    functions = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTIONS)]
    names = [path.stem, *(name for name in functions if name.startswith("test_"))]
    return [name for name in names if len(name) > TEST_NAME]


def test_the_name_of_a_test_is_short() -> None:
    assert not [name for path in (ROOT / "tests").rglob("*.py") for name in long_names(path, path.read_text())]


def test_a_long_name_is_found() -> None:
    name = "test_" + "x" * (TEST_NAME - 4)
    assert long_names(Path(f"{name}.py"), f"def {name}(): ...\ndef {name[1:]}(): ...\n") == [name, name]


def test_a_catch_all_is_found() -> None:
    paths = [Path("a/utils/b.py"), Path("a/misc.py"), Path("a/commons.py")]
    assert catch_alls(paths) == paths[:2]
