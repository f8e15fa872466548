"""The API reference page: every field of the resource, its type, bounds and default, and the rules that span fields."""

from collections.abc import Iterator
from textwrap import fill

from helm.crd.definition import root
from helm.crd.schema import Schema, as_text
from rlhf_api.names import API_VERSION, KIND

HEAD = f"""<!-- Made from crds/rlhf_api by `make generate`; do not edit. -->

# API reference

`{KIND}`, `apiVersion: {API_VERSION}`. `rlhf validate FILE` and a cluster's API server
judge a document alike, with one exception: only `rlhf validate` and the operator look at the names and the
depth of `arguments`, which may hold any JSON. A `job://` names a job outside the document: `rlhf validate`
looks for it in the file, the operator in the cluster.

- Fields in **bold** are needed. `[]` after a name: each entry of a list.
- `null` leaves a field unset, but for `spec.algorithm.valueClipRange`, where null does not clip.
- A whole number may be written `3.0` or `1e3`; none is larger than 2147483647, but for `training.seed`.
- `metadata.name` has at most 40 characters: lower-case letters, digits and `-`, with a letter first and a
  letter or digit last.

A job that exists can be changed where that leaves it the same experiment; the rules marked *change* say the
rest. Below each table is what the API server says where a rule is broken; the rules across tables are [at the
end](#rules-across-tables).
"""
OPEN = {"minimum": "more than", "maximum": "less than"}
CLOSED = {"minimum": "at least", "maximum": "at most"}
SIZES = {
    "minLength": "{} or more characters",
    "maxLength": "at most {} characters",
    "minItems": "{} or more entries",
    "maxItems": "at most {} entries",
    "maxProperties": "at most {} entries",
}


def text() -> str:
    """Return the API reference page as Markdown."""
    fields = root()["properties"]
    parts = [HEAD, *_section(fields["spec"], "spec", deep=False)]
    for name, schema in fields["spec"]["properties"].items():
        if schema["type"] == "object":
            parts += _section(schema, f"spec.{name}", deep=True)
    parts += _section(fields["status"], "status", deep=True)
    parts += ["## Rules across tables\n", *dict.fromkeys(_rules(fields["spec"], "spec", deep=False)), ""]
    return "\n".join(parts)


def _section(schema: Schema, path: str, *, deep: bool) -> Iterator[str]:
    yield f"## {path}\n"
    yield f"{_cell(schema['description'])}\n" if path != "spec" else "Spec of one job.\n"
    yield "| field | type | default | what it is |\n| --- | --- | --- | --- |"
    yield from (_row(*field) for field in _fields(schema, "", deep=deep))
    yield ""
    if deep and (rules := [*_rules(schema, path, deep=True)]):
        yield from dict.fromkeys(rules)
        yield ""


def _fields(schema: Schema, prefix: str, *, deep: bool) -> Iterator[tuple[str, Schema, bool]]:
    """Yield (path, schema, is needed) of every field below an object, each before the fields below it."""
    needed = schema.get("required", [])
    for name, each in schema["properties"].items():
        yield prefix + name, each, name in needed
        inner, suffix = (each["items"], "[].") if each["type"] == "array" else (each, ".")
        if deep and "properties" in inner:
            yield from _fields(inner, prefix + name + suffix, deep=True)


def _row(path: str, schema: Schema, needed: bool) -> str:
    name = f"**`{path}`**" if needed else f"`{path}`"
    default = schema.get("default")
    shown = "" if default is None or isinstance(default, dict) else f"`{as_text(default)}`"
    return f"| {name} | {_type(schema)} | {shown} | {_cell(schema.get('description', ''))} |"


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    words = {"integer": "whole number", "string": "text", "array": "list", "object": "mapping"}
    kind = words.get(schema["type"], str(schema["type"]))
    if schema["type"] == "array" and "properties" not in schema["items"]:
        kind = f"list of {_type(schema['items'])}"
    if "additionalProperties" in schema:
        kind = "mapping of text"
    return ", ".join([kind, *_limits(schema)])


def _limits(schema: Schema) -> Iterator[str]:
    for bound in ("minimum", "maximum"):
        value = schema.get(bound)
        if value not in (None, 2**31 - 1):
            words = OPEN if schema.get(f"exclusive{bound.capitalize()}") else CLOSED
            yield f"{words[bound]} {value}"
    yield from (words.format(schema[key]) for key, words in SIZES.items() if schema.get(key, 1) != 1)


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "&lt;")


def _rules(schema: Schema, path: str, *, deep: bool) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        change = "*change* " if "oldSelf" in rule["rule"] else ""
        words = f"- {change}`{path}{rule.get('fieldPath', '')}`: {_cell(rule['message'])}"
        yield fill(words, 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    inner = {f".{name}": each for name, each in schema.get("properties", {}).items()}
    inner |= {"[]": schema["items"]} if "items" in schema else {}
    for name, each in inner.items() if deep else ():
        yield from _rules(each, path + name, deep=True)
