"""Conversion of a pydantic model to a structural schema, Kubernetes' subset of OpenAPI 3.

A structural schema has no unions: a union of objects becomes one object, with rules about which fields go together.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from pydantic import BaseModel
from pydantic._internal._docs_extraction import extract_docstrings_from_cls
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from rlhf_api.expressions import validation
from rlhf_api.problems import choice
from rlhf_api.pydantic_errors import FORMS

Schema = dict[str, Any]

NAMED = ("env", "failureRules", "functions", "pools", "sets", "sum", "teacherEndpoints", "verifiers")
KEYS = {"conditions": "type", **dict.fromkeys(NAMED, "name")}
"""List field -> field that is the key of its entries (list type `map`); other lists are one value (`atomic`)."""
SETS = ("models", "endpoints")
"""List fields without repeated values (list type `set`)."""
KEPT = (
    *("type", "description", "enum", "pattern", "minLength", "maxLength", "minItems", "maxItems", "maxProperties"),
    "x-kubernetes-validations",
)
PLAIN = ("description", "default", "properties", "enum", "x-kubernetes-validations")
"""Keys of a field's schema that may differ between the union members that have the field."""
JSON_VALUE = {"$ref": "#/$defs/JsonValue"}
BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))


def structural_schema(model: type[BaseModel]) -> Schema:
    """Return the structural schema of a pydantic model, without references."""
    document = model.model_json_schema(by_alias=True, schema_generator=_Described)
    return _Converter(document.get("$defs", {})).convert(document)


class _Described(GenerateJsonSchema):
    """Generator of JSON schemas that describes each field by the string below it.

    With `use_attribute_docstrings` pydantic would read the strings at each import of the spec.
    """

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        made, model = super().model_schema(schema), schema["cls"]
        for each in model.__mro__:
            for name, words in extract_docstrings_from_cls(each, use_inspect=True).items():
                if name in model.model_fields:
                    made["properties"][model.model_fields[name].alias or name].setdefault("description", words)
        return made


class _Converter:
    def __init__(self, definitions: Schema) -> None:
        self._definitions = definitions

    def convert(self, node: Schema, name: str = "") -> Schema:
        """Return a part of pydantic's JSON schema as a structural schema; name: name of the part's field."""
        if "anyOf" in node:
            return self._optional(node, name)
        if "$ref" in node:
            target = self._definitions[node["$ref"].rpartition("/")[2]]
            return self.convert(target, name) | _described(node) | _default(node)
        if "oneOf" in node:
            return {**self._union(node), **_described(node)}
        schema = {key: node[key] for key in KEPT if key in node} | _described(node) | _bounds(node) | _default(node)
        if "const" in node:
            schema["enum"] = [node["const"]]
        match schema["type"]:
            case "integer":
                schema["format"] = "int64"
            case "object":
                schema |= self._object(node)
            case "array":
                schema |= self._list(node, name)
        return schema

    def _optional(self, node: Schema, name: str) -> Schema:
        """Return the schema of a field that may be null; it is `nullable` only if null differs from unset."""
        (inner,) = (each for each in node["anyOf"] if each.get("type") != "null")
        given = _default(node)
        return self.convert(inner, name) | _described(node) | given | ({"nullable": True} if given else {})

    def _union(self, node: Schema) -> Schema:
        discriminator = node.get("discriminator")
        if discriminator:
            tags = {reference: tag for tag, reference in discriminator["mapping"].items()}
            members = {tags[each["$ref"]]: self.convert(each) for each in node["oneOf"]}
            return merge_union(members, discriminator["propertyName"])
        return merge_union(_by_key([self.convert(each) for each in node["oneOf"]]), None)

    def _object(self, node: Schema) -> Schema:
        if "properties" in node:
            schema: Schema = {"properties": {key: self.convert(each, key) for key, each in node["properties"].items()}}
            return schema | ({"required": node["required"]} if "required" in node else {})
        if JSON_VALUE in node["patternProperties"].values():
            return {"x-kubernetes-preserve-unknown-fields": True}
        ((pattern, values),) = node["patternProperties"].items()
        longest = node["propertyNames"]["maxLength"]
        names = f"self.all(key, size(key) <= {longest} && key.matches(r'{pattern}'))"
        rule = validation(names, f"expected names that are {FORMS[pattern]}")
        return {"additionalProperties": self.convert(values), "x-kubernetes-validations": [rule]}

    def _list(self, node: Schema, name: str) -> Schema:
        items = node["items"] if "items" in node else node["prefixItems"][0]
        schema: Schema = {"items": self.convert(items), "x-kubernetes-list-type": "atomic"}
        if name in KEYS:
            return schema | {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [KEYS[name]]}
        is_set = name in SETS and schema["items"]["type"] != "object"
        return schema | ({"x-kubernetes-list-type": "set"} if is_set else {})


def _described(node: Schema) -> Schema:
    """Return {"description": text} with a schema node's description on one line; {} if the node has none."""
    return {"description": " ".join(node["description"].split())} if "description" in node else {}


def _bounds(node: Schema) -> Schema:
    bounds: Schema = {}
    for bound, exclusive in BOUNDS:
        if exclusive in node:
            bounds |= {bound: node[exclusive], exclusive: True}
        elif bound in node:
            bounds[bound] = node[bound]
    return bounds


def _default(node: Schema) -> dict[str, Any]:
    return {"default": _given(node["default"])} if node.get("default") is not None else {}


def _given(value: Any) -> Any:
    """Return a field's default without its null fields."""
    if not isinstance(value, dict):
        return value
    return {key: _given(each) for key, each in value.items() if each is not None}


def merge_union(members: Mapping[str, Schema], discriminator: str | None) -> Schema:
    """Return one object schema with the fields of all members of a union (name -> schema).

    The value of the field `discriminator` selects a member. Without one, the field with a member's name selects it.
    """
    fields = dict.fromkeys(field for member in members.values() for field in member["properties"])
    owners = {field: [name for name, each in members.items() if field in each["properties"]] for field in fields}
    properties = {field: _merged_field(field, owned, members, discriminator) for field, owned in owners.items()}
    schema: Schema = {"type": "object", "properties": properties}
    if discriminator:
        schema["required"] = [discriminator]
        kinds = (f"{name}: {member['properties'][discriminator]['description']}" for name, member in members.items())
        properties[discriminator]["description"] = " ".join(kinds)
        tests = {name: f"self.{discriminator} == '{name}'" for name in members}
    else:
        tests = {name: f"has(self.{name})" for name in members}
    schema["x-kubernetes-validations"] = _rules(owners, members, tests, discriminator)
    return schema


def _merged_field(field: str, owned: list[str], members: Mapping[str, Schema], discriminator: str | None) -> Schema:
    """Return the schema of a union's field; if not all members have the field, its description names those that do."""
    schema = _merged({name: members[name]["properties"][field] for name in owned})
    if len(owned) == len(members) or owned == [field]:
        return schema
    return _with_words(schema, f"{'For' if discriminator else 'With'} {choice(owned)} only.")


def _rules(
    owners: Mapping[str, list[str]], members: Mapping[str, Schema], tests: Mapping[str, str], discriminator: str | None
) -> list[Schema]:
    """Return CEL rules for a union: only a field's `owners` may have it, and members that require the field must.

    owners: field -> members with it; tests: member -> CEL that is true for an object of this member.
    """
    one = f"[{', '.join(tests.values())}].filter(given, given).size() == 1"
    rules = [] if discriminator else [validation(one, f"expected exactly one of {choice(tests)}")]
    for field, owned in owners.items():
        chosen = [tests[name] for name in owned]
        if len(owned) < len(tests) and f"has(self.{field})" not in chosen:
            message = f"is {'for' if discriminator else 'with'} {choice(owned)} only"
            rules.append(validation(f"!has(self.{field}) || {' || '.join(chosen)}", message, field))
        needing = (tests[name] for name, each in members.items() if field in each.get("required", ()))
        asking = [test for test in needing if test != f"has(self.{field})"]
        if asking and field != discriminator:
            rules.append(validation(f"has(self.{field}) || !({' || '.join(asking)})", "is missing", field))
    return rules


def _by_key(members: Sequence[Schema]) -> dict[str, Schema]:
    """Return field -> member of a union: the one field that this member requires and that no other member has."""
    named: dict[str, Schema] = {}
    for member in members:
        others = {field for other in members if other is not member for field in other["properties"]}
        (key,) = (field for field in member["required"] if field not in others)
        named[key] = member
    return named


def _merged(variants: Mapping[str, Schema], *, keeps_default: bool = False) -> Schema:
    """Return one schema for a field of several union members; its description says the defaults.

    keeps_default: a default that all members share stays in the schema.
    """
    first, *others = variants.values()
    schema = deepcopy(first)
    for other in others:
        if {**first, **dict.fromkeys(PLAIN)} != {**other, **dict.fromkeys(PLAIN)}:
            raise TypeError(f"one field, two types: {first} and {other}")
    if "enum" in first:
        schema["enum"] = list(dict.fromkeys(value for each in variants.values() for value in each["enum"]))
    for field in first.get("properties", ()):
        fields = {name: each["properties"][field] for name, each in variants.items()}
        schema["properties"][field] = _merged(fields, keeps_default=True)
    return _with_defaults_in_words(schema, variants, keeps_default=keeps_default)


def _with_defaults_in_words(schema: Schema, variants: Mapping[str, Schema], *, keeps_default: bool) -> Schema:
    """Return the schema with the members' defaults moved into its description; defaults of objects are dropped."""
    defaults = {name: each["default"] for name, each in variants.items() if "default" in each}
    shares_one = len({json.dumps(default) for default in defaults.values()}) == 1
    if not defaults or (keeps_default and shares_one):
        return schema
    usual = schema.pop("default", None)
    return schema if schema["type"] == "object" else _with_words(schema, _defaults(usual, defaults))


def _defaults(usual: Any, defaults: Mapping[str, Any]) -> str:
    """Return defaults in words, `Default: 0.2.` or `Default: 0.05 (GRPO 0.04).`; a usual default of None is `unset`."""
    unusual = [f"{name} {as_text(value)}" for name, value in defaults.items() if value != usual]
    usual = "unset" if usual is None else usual
    return f"Default: {as_text(usual)}{f' ({choice(unusual)})' if unusual else ''}.".replace(" or ", ", ")


def as_text(value: Any) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _with_words(schema: Schema, more: str) -> Schema:
    return {**schema, "description": f"{schema['description']} {more}"}
