"""A structural schema (Kubernetes' part of OpenAPI 3) of a typed value."""

from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from rlhf_api.contract import FORMS
from rlhf_api.crd.union import Schema, by_key, flat
from rlhf_api.expressions import validation

KEYS = MappingProxyType(
    {
        "conditions": "type",
        "env": "name",
        "failureRules": "name",
        "functions": "name",
        "pools": "name",
        "sum": "name",
    }
)
"""The lists whose entries have a key, and its field; any other list is one value (atomic)."""
SETS = ("models",)
"""Lists in which a value is at most once."""
KEPT = (
    *("type", "description", "enum", "pattern", "minLength", "maxLength", "minItems", "maxItems", "maxProperties"),
    "x-kubernetes-validations",
)
JSON_VALUE = {"$ref": "#/$defs/JsonValue"}
BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))


def structural(model: type[BaseModel]) -> Schema:
    """The schema of a model, without references."""
    document = model.model_json_schema(by_alias=True)
    return _Converter(document.get("$defs", {})).convert(document)


class _Converter:
    def __init__(self, definitions: Schema) -> None:
        self._definitions = definitions

    def convert(self, node: Schema, name: str = "") -> Schema:
        """A node of pydantic's JSON schema as a structural one; name: that of its field."""
        if "anyOf" in node:
            return self._optional(node, name)
        if "$ref" in node:
            return self._reference(node, name)
        if "oneOf" in node:
            return {**self._union(node), **_described(node)}
        schema = {key: node[key] for key in KEPT if key in node} | _bounds(node) | _default(node)
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

    def _reference(self, node: Schema, name: str) -> Schema:
        target = node["$ref"].rpartition("/")[2]
        schema = self.convert(self._definitions[target], name) | _described(node)
        return schema | _default(node)

    def _optional(self, node: Schema, name: str) -> Schema:
        """The schema of a field that may be null; only null that differs from unset makes it `nullable`."""
        (inner,) = (each for each in node["anyOf"] if each.get("type") != "null")
        schema = self.convert(inner, name) | _described(node)
        given = _default(node)
        return schema | given | ({"nullable": True} if given else {})

    def _union(self, node: Schema) -> Schema:
        discriminator = node.get("discriminator")
        if discriminator:
            tags = {reference: tag for tag, reference in discriminator["mapping"].items()}
            members = {tags[each["$ref"]]: self.convert(each) for each in node["oneOf"]}
            return flat(members, discriminator["propertyName"])
        return flat(by_key([self.convert(each) for each in node["oneOf"]]), None)

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
        return schema | ({"x-kubernetes-list-type": "set"} if name in SETS else {})


def _described(node: Schema) -> Schema:
    return {"description": node["description"]} if "description" in node else {}


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
    """A default without its fields that are null."""
    if not isinstance(value, dict):
        return value
    return {key: _given(each) for key, each in value.items() if each is not None}
