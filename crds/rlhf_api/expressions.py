"""Expressions over a spec, written once: Python evaluates them, and they print as CEL for a cluster's API server.

A test that needs the value of an optional field holds where that field is not given.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.alias_generators import to_snake
from pydantic_core import CoreSchema, core_schema

from rlhf_api.quantities import amount

Values = Mapping[str, Any]
"""Name of a field path's starting point -> its Python value; the name is `spec`, `each`, `one` or `value`.

`each` is an entry of a rule's list, `one` a list entry that `where` tests, `value` the field that a Check annotates.
"""
Places = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Name of a field path's starting point -> (its name in the CEL rule, its structural schema)."""
WITHOUT_VALUES = (
    (r'^is "?\{[\w:]+\}"?, (?=more|fewer)', "is "),
    (r'^is "?\{[\w:]+\}"?[;,] (but |which )?', ""),
    (r"[;,] [^;,{}]*\{(?!name)[^}]*\}$| \(\{[^}]*\}\)", ""),
    (r"\{name\}", "this algorithm"),
    (r"\{form\}", "no model"),
    (r"\{count\}", "no or several"),
    (r'"\{value\}"', "this"),
    (r"\{\w+\} ", ""),
)


def _operation(template: str, compute: Callable[..., Any]) -> Callable[..., Expression]:
    """Return a function that joins operands into an expression, given its CEL template and its Python function."""

    def operation(*operands: object) -> Expression:
        parts = [each if isinstance(each, Expression) else _constant(each) for each in operands]
        return Expression(
            lambda values: compute(*[each.of(values) for each in parts]),
            lambda places: template.format(*(each.cel(places) for each in parts)),
            tuple(field for each in parts for field in each.needs),
        )

    return operation


class Expression:
    """Expression over a spec: `of(values)` is its value, `cel(places)` its CEL text; it needs the fields in `needs`."""

    def __init__(
        self, of: Callable[[Values], Any], cel: Callable[[Places], str], needs: tuple[Field, ...] = ()
    ) -> None:
        self.of, self.cel, self.needs = of, cel, needs

    __and__ = _operation("({} && {})", operator.and_)
    __or__ = _operation("({} || {})", operator.or_)
    __invert__ = _operation("!{}", operator.not_)
    __eq__ = _operation("({} == {})", operator.eq)  # type: ignore[assignment]
    __ne__ = _operation("({} != {})", operator.ne)  # type: ignore[assignment]
    __lt__ = _operation("({} < {})", operator.lt)
    __le__ = _operation("({} <= {})", operator.le)
    __gt__ = _operation("({} > {})", operator.gt)
    __ge__ = _operation("({} >= {})", operator.ge)
    __add__ = _operation("({} + {})", operator.add)
    __mul__ = _operation("({} * {})", operator.mul)
    __mod__ = _operation("({} % {})", operator.mod)
    __hash__ = object.__hash__
    implies = _operation("(!{} || {})", lambda one, other: not one or other)
    then = _operation("({} ? {} : {})", lambda test, value, otherwise: value if test else otherwise)
    one_of = _operation("({} in {})", lambda value, choices: value in choices)
    contains = _operation("({1} in {0})", operator.contains)
    size = _operation("{}.size()", len)
    first_name = _operation("{}[0].name", lambda entries: entries[0].name if entries else None)
    as_float = _operation("double({})", float)
    starts_with = _operation("{}.startsWith({})", str.startswith)
    matches = _operation("{}.matches({})", lambda text, pattern: re.search(pattern, text) is not None)
    quantity_minus = _operation("quantity({}).compareTo(quantity({}))", lambda one, two: amount(one) - amount(two))
    """Difference of two quantities, of which only the sign counts: CEL gives -1, 0 or 1."""


def _constant(value: object) -> Expression:
    return Expression(lambda _: value, lambda _: _literal(value))


def _literal(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f"r'{value}'" if "\\" in value else f"'{value}'"
        case tuple():
            return f"[{', '.join(map(_literal, value))}]"
    return str(value)


class Field(Expression):
    """Expression for the value at a path in camelCase; after `[]` the path goes on in `each` entry of the list."""

    def __init__(self, path: str, root: str = "spec") -> None:
        super().__init__(self._value, lambda places: ".".join([places[self._root][0], *self._parts]), (self,))
        _, entry, after = path.partition("[]")
        self._root, path = ("each", after[1:]) if entry else (root, path)
        self._parts = path.split(".") if path else []
        self._attributes = [*map(to_snake, self._parts)]

    def _value(self, values: Values) -> Any:
        """Return the value at the path; None if the field, or a field above it, is unset."""
        value = values[self._root]
        for name in self._attributes:
            value = getattr(value, name, None)
        return value

    def presence(self, places: Places) -> list[str]:
        """Return a CEL test `has(...)` for each part of the path that a document may leave out."""
        (name, schema), tests = places[self._root], []
        for part in self._parts:
            name = f"{name}.{part}"
            if part not in schema.get("required", ()) and "default" not in schema["properties"][part]:
                tests.append(f"has({name})")
            schema = schema["properties"][part]
        return tests

    @property
    def is_given(self) -> Expression:
        """Expression that is true if the field has a value."""
        return Expression(
            lambda values: self.of(values) is not None,
            lambda places: f"({' && '.join(self.presence(places)) or 'true'})",
        )

    def or_else(self, default: Expression | str | float) -> Expression:
        """Return an expression (Python and CEL) with the field's value, or with `default` where the field is unset."""
        other = default if isinstance(default, Expression) else _constant(default)
        return Expression(
            lambda values: other.of(values) if self.of(values) is None else self.of(values),
            lambda places: f"({self.is_given.cel(places)} ? {self.cel(places)} : {other.cel(places)})",
        )

    def where(self, test: Expression) -> Expression:
        """Return the expression for the entries of a list that pass a test; the test names an entry `one`."""

        def cel(places: Places) -> str:
            entry = entries(places[self._root][1], ".".join(self._parts))
            chosen = test.cel({**places, "one": ("one", entry)})
            return f"({self.is_given.cel(places)} ? {self.cel(places)}.filter(one, {chosen}) : [])"

        return Expression(
            lambda values: [each for each in self.of(values) or () if test.of({**values, "one": each})], cel
        )


VALUE = Field("", "value")
"""Expression for the value of the field that a Check annotates."""


def entries(schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the structural schema of the entries of the list at a path."""
    for part in path.split("."):
        schema = schema["properties"][part]
    return dict(schema["items"])


def holds(test: Expression, values: Values) -> bool:
    """Whether a test is true of a spec, or a field that the test needs is unset."""
    return any(field.of(values) is None for field in test.needs) or bool(test.of(values))


def as_cel(test: Expression, places: Places) -> str:
    """Return a test in CEL; the text is true where a field that the test needs is unset."""
    needed = dict.fromkeys(given for field in test.needs for given in field.presence(places))
    return " || ".join([*(f"!{given}" for given in needed), test.cel(places)])


def validation(rule: str, message: str, field: str = "") -> dict[str, str]:
    """Return an entry of x-kubernetes-validations; field: the path from the rule's object to the field at fault."""
    return {"rule": rule, "message": message} | ({"fieldPath": f".{field}"} if field else {})


def without_values(message: str) -> str:
    """Return a message with its {values} replaced by fixed words or removed: the API server's messages are fixed."""
    for pattern, words in WITHOUT_VALUES:
        message = re.sub(pattern, words, message)
    return message


@dataclass(frozen=True)
class Check:
    """Annotation of a field with a test of its VALUE, for pydantic and for the API server."""

    test: Expression
    message: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        document = handler(schema)
        rule = validation(as_cel(self.test, {"value": ("self", {})}), without_values(self.message))
        return {**document, "x-kubernetes-validations": [*document.get("x-kubernetes-validations", ()), rule]}

    def _checked(self, value: object) -> object:
        if not holds(self.test, {"value": value}):
            raise ValueError(self.message.format(value=value))
        return value
