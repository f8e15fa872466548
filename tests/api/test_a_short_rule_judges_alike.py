"""The CRD's rules are shortened to fit `kubectl apply`; CEL, evaluated by Google's own library, gives one answer."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from cel_expr_python import cel

from helm.crd.cel import shorten
from helm.crd.compact import RULES, compact
from helm.crd.definition import root
from helm.crd.schema import Schema
from tests.api.cases import RIGHT, WRONG
from tests.api.test_cel_says_what_python_says import ENV, stored
from tests.each import each_case

NAMES = frozenset({"'PPO'", "'GRPO'", "'SFT'", "'Custom'"})
SHORTENED = {
    "(!(self.a != 'x') || (!(has(self.b)) || (self.c)))": "self.a == 'x' || !has(self.b) || self.c",
    "!(self.name != 'Custom') || (!(self.name in ['PPO', 'GRPO']) || has(self.b))": (
        "self.name in ['Custom', 'SFT'] || has(self.b)"
    ),
    "!has(self.a) || ((has(self.a) && has(self.a.b)) ? self.a.b : 1) > 0": (
        "!has(self.a) || (has(self.a.b) ? self.a.b : 1) > 0"
    ),
    "self.name in ['SFT'] || !(self.name in ['SFT'])": "true",
    "!(self.list.filter(one, (one.x == 1)).size() > 0)": "!self.list.exists(one, one.x == 1)",
    "(self.a * self.b) % self.c == -1": "self.a * self.b % self.c == -1",
    "self.a - (self.b - self.c) < 0": "self.a - (self.b - self.c) < 0",
    "!(self.a.all(each, each.b[0].c || !each.d))": "!self.a.all(each, each.b[0].c || !each.d)",
}


@each_case("rule", SHORTENED)
def test_a_rule_loses_what_says_nothing(rule: str) -> None:
    assert shorten(rule, {"self.name": NAMES}) == SHORTENED[rule]


@cache
def program(rule: str) -> cel.Expression:
    return ENV.compile(rule)


def broken(schema: Schema, value: Any, path: str = "spec") -> Iterator[str]:
    """Yield the path of each rule that does not hold; for a joined rule the path that its message names."""
    known = ENV.Activation({"self": value}) if RULES in schema else None
    for rule in schema.get(RULES, ()):
        if "oldSelf" in rule["rule"] or "quantity(" in rule["rule"]:
            continue
        holds = program(rule["rule"]).eval(known).plain_value()
        if not isinstance(holds, bool):
            raise TypeError(holds)  # a field is missing
        if not holds:
            said = rule.get("messageExpression")
            named = f".{program(said).eval(known).plain_value().partition(':')[0]}" if said else ""
            yield f"{path}{rule.get('fieldPath', '')}{named}"
    if "enum" in schema and value not in schema["enum"]:
        yield path
    for name, each in value.items() if "properties" in schema else ():
        yield from broken(schema["properties"][name], each, f"{path}.{name}")
    for place, each in enumerate(value if "items" in schema else ()):
        yield from broken(schema["items"], each, f"{path}.{place}")


def test_every_case_breaks_the_same_fields() -> None:
    schema, named = root(), set[str]()
    full_spec, short_spec = (each["properties"]["spec"] for each in (schema, compact(schema)))
    for name, case in {**RIGHT, **WRONG}.items():
        try:
            spec = stored(case.document()["spec"], full_spec)
            full = {*broken(full_spec, spec)}
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # a value is of another type, or a field is unknown or missing
        short = {*broken(short_spec, spec)}
        assert short <= full, name
        assert bool(short) == bool(full), name
        named |= full
    assert len(named) > 100
