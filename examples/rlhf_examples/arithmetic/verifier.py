"""A reward that can be verified: whether a response ends with the result of the calculation in its prompt."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_TERM = r"[(\s]*(?:-\s*)?\d{1,9}[)\s]*"
_CALCULATION = re.compile(rf"{_TERM}(?:[-+*/]{_TERM})+")
_NUMBER = re.compile(r"-?\d+(?:/\d+|\.\d+)?")


def score(prompts: list[str], responses: list[str], finished: list[bool], *, right: float = 1.0) -> list[float]:
    """`right` for each response whose last number is the result, and 0 for any other.

    The calculation is the last one in the prompt: whole numbers, + - * / and parentheses; a prompt without one makes
    every response wrong. A number may be a decimal or a fraction. A response that was cut off is wrong.

    >>> score(["What is 2 + 3 * 4?", "(1 + 2) / 2 = "], ["Easy: it is 14.", "3/2"], [True, True])
    [1.0, 1.0]
    >>> score(["2 + 2 ="] * 3, ["5", "4, or is it 3?", "4"], [True, True, False])
    [0.0, 0.0, 0.0]
    """
    return [
        right if done and (answer := _answer(response)) is not None and answer == _result(prompt) else 0.0
        for prompt, response, done in zip(prompts, responses, finished, strict=True)
    ]


def _answer(response: str) -> Fraction | None:
    """The last number of a response."""
    numbers = _NUMBER.findall(response)
    try:
        return Fraction(numbers[-1]) if numbers else None
    except (ValueError, ZeroDivisionError):
        return None


def _result(prompt: str) -> Fraction | None:
    """The result of the last calculation in a prompt; None if there is none, or if it has no result."""
    calculations = _CALCULATION.findall(prompt)
    try:
        return _value(ast.parse(calculations[-1].strip(), mode="eval").body) if calculations else None
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=operation, right=right):
            value: Fraction = _OPERATIONS[type(operation)](_value(left), _value(right))
            return value
    raise ValueError("not a calculation")
