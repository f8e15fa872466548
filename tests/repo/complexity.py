"""Cyclomatic complexity of functions, as radon's `cc` counts it."""

import ast
from collections.abc import Iterator

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions_of(source: str) -> Iterator[tuple[str, int, int]]:
    """Name, line and complexity of each function of a module, methods too; inner functions count to their outer one."""
    yield from _functions(ast.parse(source), "")


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield prefix + child.name, child.lineno, 1 + sum(map(_branches, ast.walk(child)))
        else:
            inner = f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix
            yield from _functions(child, inner)


def _branches(node: ast.AST) -> int:
    """Ways that a node adds: one for each condition, loop, handler, assertion and further operand of `and` or `or`."""
    if isinstance(node, ast.Try | ast.TryStar):
        return len(node.handlers) + bool(node.orelse)
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.For | ast.AsyncFor | ast.While):
        return 1 + bool(node.orelse)
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return int(isinstance(node, ast.If | ast.IfExp | ast.Assert | ast.match_case))
