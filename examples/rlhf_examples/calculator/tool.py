"""The tool of example 18."""

from __future__ import annotations

import ast
import operator

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """Calculate with whole numbers.

    Args:
        expression: Numbers with +, -, *, // and % between them, such as 12*34%5.
    """
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> int:
    """The value of a part of an expression; ValueError for what is no such operation."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        found: int = OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
        return found
    raise ValueError("expected whole numbers with +, -, *, // and % between them")
