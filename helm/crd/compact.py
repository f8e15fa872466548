"""The CRD's schema in fewer bytes: `kubectl apply` keeps the whole object in an annotation, which has a limit.

The short schema accepts and refuses the same specs. The API reference is made from the full schema.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from itertools import groupby, takewhile

from helm.crd.cel import Domains, Node, any_of, dense, negated, operands, parse, shorten
from helm.crd.schema import Schema
from rlhf_api.expressions import validation

Rule = dict[str, str]
RULES = "x-kubernetes-validations"
DESCRIBED = {"spec": 3, "status": 1}
"""Part of the resource -> levels of fields below it that keep a description, for `kubectl explain`."""
BOUNDS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "maxLength", "minItems", "maxItems", "pattern", "enum"),
)
"""Keys that bound a value; the status has none of them, since the operator alone writes it, from a typed class."""
USUAL = {"format": "int64", "x-kubernetes-list-type": "atomic"}
"""Key of a schema -> value that is left out, because it changes nothing for Kubernetes."""


def compact(schema: Schema) -> Schema:
    """Return a resource's schema with shorter rules, and with the first sentence of each description, written once."""
    seen: set[tuple[str, str]] = set()
    schema = _with_children(schema, lambda part, each: _without_bounds(each) if part == "status" else each)
    return _with_children(_shorter(schema), lambda part, each: _with_words(each, DESCRIBED.get(part, 0), seen, part))


def _with_children(schema: Schema, change: Callable[[str, Schema], Schema]) -> Schema:
    """Return a schema in which each schema directly below is changed: change(name of its field or "", schema)."""
    inner: Schema = {key: change("", schema[key]) for key in ("items", "additionalProperties") if key in schema}
    if "properties" in schema:
        inner["properties"] = {name: change(name, each) for name, each in schema["properties"].items()}
    return {**schema, **inner}


def _without_bounds(schema: Schema) -> Schema:
    kept = {key: each for key, each in schema.items() if key not in (*BOUNDS, RULES)}
    return _with_children(kept, lambda _, each: _without_bounds(each))


def _with_words(schema: Schema, levels: int, seen: set[tuple[str, str]], name: str) -> Schema:
    """Return a schema with the first sentence of each description, down to some levels, and without usual values.

    A description that a field of the same name has had before is left out; seen: (name, description).
    """
    words = schema.get("description", "").partition(". ")[0]
    kept = {key: each for key, each in schema.items() if key != "description" and USUAL.get(key) != each}
    if words and levels >= 0 and (name, words) not in seen:
        seen.add((name, words))
        kept["description"] = words
    return _with_children(
        kept, lambda field, each: _with_words(each, levels - 1 if field else levels, seen, field or name)
    )


def _shorter(schema: Schema) -> Schema:
    """Return a schema whose rules are short, and stand at the objects that they are about."""
    schema, kept = _with_children(schema, lambda _, each: _shorter(each)), []
    domains = _domains(schema, "self")
    for rule in ({**each, "rule": shorten(each["rule"], domains)} for each in schema.pop(RULES, [])):
        if names := _listed(rule["rule"]):
            schema["enum"] = names
        elif not _is_moved(rule, schema):
            kept.append(rule)
    order = [*dict.fromkeys(map(_message, kept))]
    groups = groupby(sorted(kept, key=lambda rule: order.index(rule["message"])), _message)
    joined = [each for _, group in groups for each in _joined([*group])]
    return {**schema, RULES: joined} if joined else schema


def _message(rule: Rule) -> str:
    return rule["message"]


def _domains(schema: Schema, path: str) -> Domains:
    """Return the values of each field with an enum below an object, as CEL writes them; lists are left out."""
    found = {path: frozenset(f"'{value}'" for value in schema["enum"])} if "enum" in schema else {}
    fields = schema.get("properties", {}).items()
    return reduce(lambda known, field: known | _domains(field[1], f"{path}.{field[0]}"), fields, found)


def _listed(rule: str) -> list[str]:
    """Return the values of a rule that says no more than an `enum`; [] for any other rule."""
    node = parse(rule)
    is_list = node.kind == "in" and str(node.parts[0]) == "self"
    return [each.text.strip("'") for each in node.parts[1].parts] if is_list else []


def _is_moved(rule: Rule, schema: Schema) -> bool:
    """Move a rule to the deepest object above its field that has all fields of the rule; False if there is none.

    The API server skips rules of an unset object, so the rule has to hold without the object.
    """
    parts, disjuncts = rule.get("fieldPath", "").split(".")[1:], [*operands(parse(rule["rule"]), "||")]
    homes = [schema]
    for name in parts:
        homes.append(homes[-1].get("properties", {}).get(name, {}))
    for depth in range(len(parts), 0, -1):
        guards = _guards(homes[:depth], parts)
        left = [each for each in disjuncts if str(each) not in guards]
        path = ".".join(("self", *parts[:depth]))
        if "properties" not in homes[depth] or not left or not _reads_only(left, path):
            continue
        if {guard for guard, is_optional in guards.items() if is_optional} <= {*map(str, disjuncts)}:
            moved = validation(str(_renamed(any_of(left), path)), rule["message"], ".".join(parts[depth:]))
            homes[depth].setdefault(RULES, []).append(moved)
            return True
    return False


def _guards(homes: Iterable[Schema], parts: Iterable[str]) -> Mapping[str, bool]:
    """Return, for each field on the way through the objects, its test `!has(...)` -> whether the field may be unset."""
    found, path = {}, "self"
    for home, name in zip(homes, parts, strict=False):
        path = f"{path}.{name}"
        field = home.get("properties", {}).get(name, {})
        found[f"!has({path})"] = name not in home.get("required", ()) and "default" not in field
    return found


def _fields(node: Node) -> Iterator[str]:
    """Yield the fields that an expression reads, such as `self.models.actor`."""
    if node.kind == "atom" or (node.kind == "select" and node.parts[0].kind in ("select", "atom")):
        yield str(node)
        return
    for part in node.parts:
        yield from _fields(part)


def _reads_only(nodes: Iterable[Node], path: str) -> bool:
    """Whether all fields of the document that the expressions read lie below the path."""
    read = [field for node in nodes for field in _fields(node) if field.startswith(("self", "oldSelf"))]
    return all(f"{field}.".startswith(f"{path}.") for field in read)


def _renamed(node: Node, path: str) -> Node:
    """Return an expression with `self` for the object at a path."""
    if str(node) == path:
        return Node("atom", text="self")
    return Node(node.kind, tuple(_renamed(each, path) for each in node.parts), node.text)


def _joined(rules: list[Rule]) -> list[Rule]:
    """Return one rule for several with one message, if that is shorter; its message names the field at fault.

    A rule for updates names all fields, because CEL that finds the changed field is as long as the separate rules.
    """
    if len(rules) == 1 or not all("fieldPath" in rule for rule in rules):
        return rules
    tests = [[*operands(parse(rule["rule"]), "||")] for rule in rules]
    common = [each for each in tests[0] if all(each in test for test in tests[1:])]
    rests = [any_of(each for each in test if each not in common) for test in tests]
    paths = [rule["fieldPath"].split(".")[1:] for rule in rules]
    above = [names[0] for names in takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False))]
    fields = [".".join(path[len(above) :]) for path in paths]
    text = str(dense(any_of([*common, Node("&&", tuple(rests))])))
    rule = validation(text, rules[0]["message"], ".".join(above))
    if any(fields) and "oldSelf" in text:
        rule["message"] = f"{', '.join(fields[:-1])} or {fields[-1]} {rule['message']}"
    elif any(fields):
        *others, last = sorted(zip(rests, fields, strict=True), key=lambda pair: len(str(pair[0])))
        named = "".join(f"{dense(negated(test))} ? '{field}' : " for test, field in others)
        message = json.dumps(f": {rule.pop('message')}")
        rule["messageExpression"] = f"({named}'{last[1]}') + {message}"
    return min([[rule], rules], key=lambda each: len(json.dumps(each)))
