"""A union of objects as one object, with rules about which fields go together: a structural schema has no unions."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from rlhf_api.expressions import validation
from rlhf_api.problems import choice

Schema = dict[str, Any]
PLAIN = ("description", "default", "properties", "enum", "x-kubernetes-validations")
"""Keys in which the schemas that several members have for one field may differ."""


def flat(members: Mapping[str, Schema], discriminator: str | None) -> Schema:
    """An object with the fields of all members, name -> schema.

    A member is told by the value of the discriminator; without one, it is named for the field that tells it.
    """
    fields = list(dict.fromkeys(field for member in members.values() for field in member["properties"]))
    owners = {field: [name for name, each in members.items() if field in each["properties"]] for field in fields}
    properties = {
        field: _merged({name: members[name]["properties"][field] for name in owned}) for field, owned in owners.items()
    }
    for field, owned in owners.items():
        if len(owned) < len(members) and owned != [field]:
            only = f"{'For' if discriminator else 'With'} {choice(owned)} only."
            properties[field] = _described(properties[field], only)
    schema: Schema = {"type": "object", "properties": properties}
    if discriminator:
        schema["required"] = [discriminator]
        kinds = (f"{name}: {member['properties'][discriminator]['description']}" for name, member in members.items())
        properties[discriminator]["description"] = " ".join(kinds)
        tests = {name: f"self.{discriminator} == '{name}'" for name in members}
    else:
        tests = {name: f"has(self.{name})" for name in members}
    schema["x-kubernetes-validations"] = _rules(owners, tests, discriminator)
    return schema


def _rules(owners: Mapping[str, list[str]], tests: Mapping[str, str], discriminator: str | None) -> list[Schema]:
    rules = [] if discriminator else [_exactly_one(tests)]
    for field, owned in owners.items():
        chosen = [tests[name] for name in owned]
        if len(owned) < len(tests) and f"has(self.{field})" not in chosen:
            message = f"is {'for' if discriminator else 'with'} {choice(owned)} only"
            rules.append(validation(f"!has(self.{field}) || {' || '.join(chosen)}", message, field))
    return rules


def _exactly_one(tests: Mapping[str, str]) -> Schema:
    one = f"[{', '.join(tests.values())}].filter(given, given).size() == 1"
    return validation(one, f"expected exactly one of {choice(tests)}")


def by_key(members: Sequence[Schema]) -> dict[str, Schema]:
    """Objects by the one field that each needs and no other has."""
    named: dict[str, Schema] = {}
    for member in members:
        others = {field for other in members if other is not member for field in other["properties"]}
        (key,) = (field for field in member["required"] if field not in others)
        named[key] = member
    return named


def _merged(variants: Mapping[str, Schema], *, keeps_default: bool = False) -> Schema:
    """One schema for a field of several members; a default that others would get too is only described."""
    first, *others = variants.values()
    schema = deepcopy(first)
    for other in others:
        if {**first, **dict.fromkeys(PLAIN)} != {**other, **dict.fromkeys(PLAIN)}:
            raise TypeError(f"one field, two types: {first} and {other}")
    if "enum" in first:
        schema["enum"] = list(dict.fromkeys(value for each in variants.values() for value in each["enum"]))
    if "properties" in first:
        for field in first["properties"]:
            fields = {name: each["properties"][field] for name, each in variants.items()}
            schema["properties"][field] = _merged(fields, keeps_default=True)
    defaults = {name: each["default"] for name, each in variants.items() if "default" in each}
    same = len({json.dumps(default) for default in defaults.values()}) == 1
    if (keeps_default and same) or not defaults:
        return schema
    del schema["default"]
    return schema if schema["type"] == "object" else _described(schema, _defaults(defaults))


def _defaults(defaults: Mapping[str, Any]) -> str:
    """`Default: 0.2.` or `Default: 0.05 (GRPO 0.04).`"""
    usual, *_ = defaults.values()
    unusual = [f"{name} {_text(value)}" for name, value in defaults.items() if value != usual]
    return f"Default: {_text(usual)}{f' ({choice(unusual)})' if unusual else ''}.".replace(" or ", ", ")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _described(schema: Schema, more: str) -> Schema:
    return {**schema, "description": f"{schema['description']} {more}"}
