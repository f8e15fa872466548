"""Rules of the CRD with the schema's types: an API server refuses a CRD in which a rule compares a double with an int.

Where a rule reads a field, a variable of the field's type takes its place; then CEL's compiler checks the types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from cel_expr_python import cel

from helm.crd.definition import definition
from tests.each import each_case

Schema = Mapping[str, Any]
TYPES = {"boolean": "BOOL", "integer": "INT", "number": "DOUBLE", "string": "STRING"}
PATH = re.compile(r"\b[A-Za-z]\w*(?:\.\w+)*")


def type_of(schema: Schema) -> Any:
    """Return CEL's type of a schema's values; objects may be anything."""
    if "items" in schema:
        return cel.Type.List(type_of(schema["items"]))
    return getattr(cel.Type, TYPES.get(schema.get("type", ""), "DYN"))


def resolved(path: str, roots: Mapping[str, Schema]) -> tuple[str, Schema, str]:
    """Split a path into that of a field and the name of a method after it; the schema is the field's."""
    root, *parts = path.split(".")
    schema = roots[root]
    for place, part in enumerate(parts):
        if part not in schema.get("properties", {}):
            return ".".join([root, *parts[:place]]), schema, "".join(f".{each}" for each in parts[place:])
        schema = schema["properties"][part]
    return path, schema, ""


def checked(rule: str, schema: Schema) -> None:
    """Compile a rule whose `self` has this schema; an error says which types do not match."""
    roots, variables = {"self": schema, "oldSelf": schema}, dict[str, Any]()
    rule = re.sub(r"\bhas\([\w.]+\)", "true", rule)
    rule = re.sub(r"quantity\(\S+\)\.compareTo\(quantity\(\S+\)\)", "0", rule)  # a function of Kubernetes
    for path, name in re.findall(r"([\w.]+)\.(?:all|exists|filter|map)\((\w+),", rule):
        roots[name] = resolved(path, roots)[1].get("items", {})

    def variable(found: re.Match[str]) -> str:
        if found[0].partition(".")[0] not in roots:
            return found[0]
        path, field, method = resolved(found[0], roots)
        if path in roots and path not in ("self", "oldSelf"):
            return found[0]
        variables[path.replace(".", "_")] = type_of(field)
        return path.replace(".", "_") + method

    text = PATH.sub(variable, rule)
    cel.NewEnv(variables=variables).compile(text)


def rules(schema: Schema, path: str = "") -> Iterator[tuple[str, str, Schema]]:
    """Yield (path, rule, schema at the path) of every rule of a schema."""
    for each in schema.get("x-kubernetes-validations", ()):
        yield path, each["rule"], schema
    for name, below in schema.get("properties", {}).items():
        yield from rules(below, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from rules(schema[name], f"{path}[]")


def test_every_rule_of_the_crd_has_matching_types() -> None:
    wrong = []
    for version in definition()["spec"]["versions"]:
        found = list(rules(version["schema"]["openAPIV3Schema"]))
        assert len(found) > 100
        for path, rule, schema in found:
            try:
                checked(rule, schema)
            except Exception as error:  # noqa: BLE001 the library raises the base class
                wrong.append((path, rule, str(error)))
    assert wrong == []


SHARE: Schema = {"type": "object", "properties": {"share": {"type": "number"}}}
SAMPLE = {
    "properties": {**SHARE["properties"], "count": {"type": "integer"}, "parts": {"type": "array", "items": SHARE}}
}


@each_case(
    ("right", "wrong"),
    [
        ("self.share == 1.0", "self.share == 1"),
        ("self.share == double(self.count)", "self.share == self.count"),
        ("self.share in [0.0, 1.0]", "self.share in [0, 1]"),
        ("(has(self.share) ? self.share : 1.0) > 0.5", "(has(self.share) ? self.share : 1) > 0.5"),
        ("!has(self.parts) || self.parts.all(one, one.share > 0.5)", "self.parts.all(one, one.share == 1)"),
        ("self.parts.size() == 1", "self.parts.size() == 1.0"),
    ],
)
def test_a_double_beside_an_int_is_refused(right: str, wrong: str) -> None:
    checked(right, SAMPLE)
    with pytest.raises(Exception, match="found no matching overload"):
        checked(wrong, SAMPLE)
