"""Listings and counts of code on pages are those of the files."""

import ast
from pathlib import Path
from textwrap import dedent, indent

from tests.repo.tree import ROOT

ALGORITHMS = ROOT / "trainer_image/rlhf_trainer/algorithms"
PAGE = ROOT / "docs/one-controller.md"


def body_of(file: Path, function: str) -> str:
    """The source of a function's body without its docstring."""
    source = file.read_text()
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    found = next(node for node in nodes if node.name == function)
    lines = source.splitlines()[found.body[1].lineno - 1 : found.end_lineno]
    return dedent("\n".join(lines))


def test_the_page_about_the_controller_shows_the_step_of_ppo() -> None:
    assert f"\n\n{indent(body_of(ALGORITHMS / 'ppo.py', 'step'), '    ')}\n\n" in PAGE.read_text()


def test_the_lines_of_a_new_algorithm_are_counted() -> None:
    lines = len((ALGORITHMS / "opo.py").read_text().splitlines())
    assert f"**{lines} lines**" in PAGE.read_text()
    assert f"(OPO: {lines} lines)" in (ROOT / "README.md").read_text()
