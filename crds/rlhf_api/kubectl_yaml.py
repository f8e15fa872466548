"""YAML as kubectl reads it (sigs.k8s.io/yaml, YAML 1.1 without timestamps, sexagesimals and repeated keys)."""

import math
import re
from collections.abc import Iterable
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode

from rlhf_api.problems import Problem, SpecError

MAX_VALUES = 100_000
"""Largest number of values in a document; a few lines of nested aliases could stand for any number of values."""
TAG = "tag:yaml.org,2002:"
SCALARS = {
    "bool": (r"y|Y|yes|Yes|YES|true|True|TRUE|on|On|ON|n|N|no|No|NO|false|False|FALSE|off|Off|OFF", "yYnNtTfFoO"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?(0[bB][01_]+|0[xX][0-9a-fA-F_]+|0[oO]?[0-7_]+|0|[1-9][0-9_]*)", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}
"""Type of YAML -> pattern of its unquoted scalars, and their first characters; the first type that fits is taken."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, AttributeError):  # a number of too many digits, or an unfitting tag
            kind = node.tag.removeprefix(TAG)
            raise ConstructorError(None, None, f"this cannot be read as {kind}", node.start_mark) from None


class _Dumper(yaml.CSafeDumper):
    """YAML writer that quotes text that `_Loader` would read as another type."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _int(_: _Loader, node: ScalarNode) -> int:
    digits = node.value.replace("_", "")
    return int(digits, 8 if re.fullmatch(r"[-+]?0[0-7]+", digits) else 0)


def _mapping(loader: _Loader, node: MappingNode) -> Iterable[dict[str, Any]]:
    if not isinstance(node, MappingNode):
        raise ConstructorError(None, None, "this is no mapping", node.start_mark)
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if key.tag == TAG + "merge":
            continue
        name, line = _key(loader.construct_object(key, deep=True)), key.start_mark.line + 1
        if name in lines:
            raise ConstructorError(None, None, f'"{name}" is given twice, first on line {lines[name]}', key.start_mark)
        lines[name] = line
    loader.flatten_mapping(node)
    mapping: dict[str, Any] = {}
    yield mapping
    for key, value in node.value:
        mapping[_key(loader.construct_object(key, deep=True))] = loader.construct_object(value)


def _key(key: object) -> str:
    """Return a mapping's key as text: `true` or `false` for a boolean, else Python's text of the key."""
    return str(key).lower() if isinstance(key, bool) else str(key)


for _name, (_pattern, _first) in SCALARS.items():
    _Loader.add_implicit_resolver(TAG + _name, re.compile(rf"(?:{_pattern})\Z"), list(_first))
_Loader.add_constructor(TAG + "bool", lambda _, node: node.value.lower() in ("y", "yes", "true", "on"))
_Loader.add_constructor(TAG + "int", _int)
_Loader.add_constructor(TAG + "map", _mapping)
for _name in ("timestamp", "binary", "omap", "pairs", "set"):  # JSON has none of them
    del _Loader.yaml_constructors[TAG + _name]


class _FastLoader(yaml.CSafeLoader, _Loader):
    """Reader by libyaml with Python's composer: the composer of libyaml ends the process if a text is nested deeply."""

    check_node, get_node = Composer.check_node, Composer.get_node

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        Composer.__init__(self)


def read(text: str, source: str) -> list[Any]:
    """Return the YAML documents in a text, empty ones as None. Raises SpecError with `source` and the line."""
    try:
        try:
            documents = list(yaml.load_all(text, _FastLoader))
        except yaml.YAMLError:
            documents = list(yaml.load_all(text, _Loader))  # its errors say more
        for number, document in enumerate(documents, start=1):
            if _values(document, {}) > MAX_VALUES:
                sentence = f"its aliases stand for more than {MAX_VALUES:,} values"
                raise SpecError([Problem(f"{source}document {number}", sentence)])
        return documents
    except RecursionError:
        raise SpecError([Problem(f"{source}the text", "is nested too deeply")]) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SpecError([Problem(f"{source}line {line}", f"cannot be read: {_reason(error)}")]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SpecError([Problem(f"{source}line {line}", "cannot be read: a character is not printable")]) from None


def read_one(text: str, source: str) -> Any:
    """Return the only YAML document in a text, None for an empty text. Raises SpecError as `read`, or for several."""
    documents = [each for each in read(text, source) if each is not None]
    if len(documents) > 1:
        raise SpecError([Problem(source.removesuffix(": "), f"holds {len(documents)} YAML documents, expected one")])
    return documents[0] if documents else None


def _values(part: object, counted: dict[int, float]) -> float:
    """Count the values in a part of a document with each alias expanded; an alias that contains itself is infinite."""
    if not isinstance(part, dict | list):
        return 1
    if id(part) not in counted:
        counted[id(part)] = math.inf
        parts = part.values() if isinstance(part, dict) else part
        counted[id(part)] = 1 + sum(_values(each, counted) for each in parts)
    return counted[id(part)]


def _reason(error: yaml.MarkedYAMLError) -> str:
    """Return the cause of a syntax error, in plain words for the frequent ones."""
    problem = str(error.problem)
    if "'\\t'" in problem:
        return "there is a tab, and only spaces indent"
    if problem.startswith("expected <block end>"):
        return "its indentation does not fit the lines above"
    if error.context == "while scanning a quoted scalar" and error.context_mark:
        return f"the quote of line {error.context_mark.line + 1} is not closed"
    return problem


def write(document: Any) -> str:
    """Return a document as YAML that `read` reads back."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
