"""A reader and a shortener of the CEL in the CRD's rules: fewer bytes for the same answer to every document.

An operand is shortened by what the operands before it imply: in `!has(a) || f`, `has(a)` is true in f. A field with an
`enum` is a set of values, so tests of it are joined, and written as the shorter of `in` and its negation.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

TOKEN = re.compile(r"\s*(r?'[^']*'|\d+\.\d+|\d+|\w+|\|\||&&|[=!<>]=|\S)")
LEVELS = ({"?"}, {"||"}, {"&&"}, {"==", "!=", "<", "<=", ">", ">=", "in"}, {"+", "-"}, {"*", "/", "%"})
LEVEL = {operator: level for level, operators in enumerate(LEVELS) for operator in operators}
UNARY, MEMBER = len(LEVELS), len(LEVELS) + 1
DUALS = {"||": "&&", "&&": "||"}
OPPOSITES = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


@dataclass(frozen=True)
class Node:
    """Part of a CEL expression: a text without operators, or an operator with operands, such as `&&`, `!` or `call`.

    The operands of `call` are the called function and its arguments, the operands of `list` its entries.
    """

    kind: str
    parts: tuple["Node", ...] = ()
    text: str = ""

    def __str__(self) -> str:
        return self.at(0)

    def at(self, level: int) -> str:
        """Return the text, in parentheses where it binds less than `level`."""
        parts = self.parts
        match self.kind:
            case "atom":
                return self.text
            case "!" | "-" if len(parts) == 1:
                return self.kind + parts[0].at(UNARY)
            case "select":
                return f"{parts[0].at(MEMBER)}.{self.text}"
            case "index":
                return f"{parts[0].at(MEMBER)}[{parts[1]}]"
            case "call":
                return f"{parts[0].at(MEMBER)}({', '.join(map(str, parts[1:]))})"
            case "list":
                return f"[{', '.join(map(str, parts))}]"
            case "?":
                own, written = 0, f"{parts[0].at(1)} ? {parts[1].at(1)} : {parts[2].at(0)}"
            case operator:
                own = LEVEL[operator]
                first, *others = parts
                tight = own if operator in "&&||" else own + 1
                written = f" {operator} ".join([first.at(own), *(each.at(tight) for each in others)])
        return f"({written})" if own < level else written


COUNTED = re.compile(r"(?P<list>[\w.]+)\.filter\((?P<test>[^()]*(\([^()]*\))?)\)\.size\(\) (?P<bound>.*)")
COUNTS = {"> 0": ("", "exists"), "<= 0": ("!", "exists"), "== 0": ("!", "exists"), "== 1": ("", "exists_one")}
TRUE, FALSE = Node("atom", text="true"), Node("atom", text="false")
Domains = dict[str, frozenset[str]]
"""Path of a field with an enum, such as `self.algorithm.name` -> literals of the values that it may still have."""


def shorten(rule: str, domains: Domains) -> str:
    """Return a rule that gives the same answer as `rule` for each document that the schema allows, in fewer bytes."""
    return str(dense(_simple(parse(rule), {}, domains)))


def dense(node: Node) -> Node:
    """Return a node that reads `!(a || b)` for `!a && !b`, and `x.exists(...)` for `x.filter(...).size() > 0`."""
    node = replace(node, parts=tuple(map(dense, node.parts)))
    if node.kind != "&&":
        return _counted(node)
    denied = [each for each in node.parts if each.kind == "!"]
    if len(denied) < 2:
        return node
    none = Node("!", (Node("||", tuple(each.parts[0] for each in denied)),))
    others = [each for each in node.parts if each not in denied]
    return Node("&&", (*others, none)) if others else none


def _counted(node: Node) -> Node:
    """Return `x.exists(...)` for `x.filter(...).size() > 0`, and `x.exists_one(...)` for a size of 1."""
    found = COUNTED.fullmatch(str(node))
    if not found or found["bound"] not in COUNTS:
        return node
    denied, macro = COUNTS[found["bound"]]
    return parse(f"{denied}{found['list']}.{macro}({found['test']})")


def parse(text: str) -> Node:
    """Return the tree of a CEL expression."""
    return _Reader(TOKEN.findall(text)).read()


class _Reader:
    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens, self._at = [*tokens, ""], 0

    def _next(self, *expected: str) -> str:
        """Return the next token and step over it; "" if it is none of the expected."""
        token = self._tokens[self._at]
        if expected and token not in expected:
            return ""
        self._at += 1
        return token

    def read(self, level: int = 0) -> Node:
        if level == UNARY:
            sign = self._next("!", "-")
            return Node(sign, (self.read(UNARY),)) if sign else self._member()
        found = self.read(level + 1)
        while operator := self._next(*LEVELS[level]):
            if operator == "?":
                then = self.read(1)
                self._next(":")
                found = Node("?", (found, then, self.read()))
            else:
                found = Node(operator, (found, self.read(level + 1)))
        return found

    def _member(self) -> Node:
        if self._next("("):
            found = self.read()
            self._next(")")
        elif self._next("["):
            found = Node("list", self._until("]"))
        else:
            found = Node("atom", text=self._next())
        while mark := self._next(".", "[", "("):
            if mark == ".":
                found = Node("select", (found,), self._next("?") + self._next())
            elif mark == "[":
                found = Node("index", (found, *self._until("]")))
            else:
                found = Node("call", (found, *self._until(")")))
        return found

    def _until(self, end: str) -> tuple[Node, ...]:
        parts = []
        while not self._next(end):
            parts.append(self.read())
            self._next(",")
        return tuple(parts)


def negated(node: Node) -> Node:
    """Return the negation of a boolean expression."""
    if node.kind == "!":
        return node.parts[0]
    if node.kind in OPPOSITES:
        return replace(node, kind=OPPOSITES[node.kind])
    if node.kind in DUALS:
        return Node(DUALS[node.kind], tuple(map(negated, node.parts)))
    return {TRUE: FALSE, FALSE: TRUE}.get(node, Node("!", (node,)))


def any_of(parts: Iterable[Node]) -> Node:
    """Return the expression that is true if one of the parts is; a single part is returned as it is."""
    first, *others = parts
    return Node("||", (first, *others)) if others else first


def operands(node: Node, kind: str) -> Iterator[Node]:
    """Yield the operands of a chain of `&&` or of `||`; the node itself if it is none."""
    if node.kind == kind:
        yield from chain.from_iterable(operands(each, kind) for each in node.parts)
    elif node.kind == "!" and node.parts[0].kind == DUALS[kind]:
        yield from operands(negated(node.parts[0]), kind)
    else:
        yield node


def _simple(node: Node, known: dict[str, Node], domains: Domains) -> Node:
    """Return a shorter node of the same value; known: text of an expression -> its value here, true or false."""
    if str(node) in known:
        return known[str(node)]
    if node.kind in DUALS or (node.kind == "!" and node.parts[0].kind in DUALS):
        kind = node.kind if node.kind != "!" else DUALS[node.parts[0].kind]
        return _chain(kind, [*operands(node, kind)], known, domains)
    if values := _values(node, domains):
        return _membership(*values, domains)
    if node.kind == "!":
        return negated(_simple(node.parts[0], known, domains))
    if node.kind == "?":
        test, *results = node.parts
        test = _simple(test, known, domains)
        then, other = (
            _simple(each, *_given(test, is_true, known, domains))
            for each, is_true in zip(results, (True, False), strict=True)
        )
        return {TRUE: then, FALSE: other}.get(test, Node("?", (test, then, other)))
    return replace(node, parts=tuple(_simple(each, known, domains) for each in node.parts))


def _chain(kind: str, parts: list[Node], known: dict[str, Node], domains: Domains) -> Node:
    """Return a shorter chain: each operand is shortened by what the operands before it imply."""
    holds, absorbing, neutral = kind == "&&", *((FALSE, TRUE) if kind == "&&" else (TRUE, FALSE))
    joined: dict[str, frozenset[str]] = {}
    others = []
    for part in parts:
        if values := _values(part, domains):
            path, allowed = values
            before = joined.get(path, domains[path] if holds else frozenset())
            joined[path] = before & allowed if holds else before | allowed
        else:
            others.append(part)
    tests = [_membership(path, allowed, domains) for path, allowed in joined.items()]
    kept: list[Node] = []
    for each in [*tests, *others]:
        short = each if each in tests else _simple(each, known, domains)
        if short == absorbing:
            return absorbing
        for part in operands(short, kind):
            if part != neutral and part not in kept:
                kept.append(part)
        known, domains = _given(short, holds, known, domains)
    return Node(kind, tuple(kept)) if len(kept) > 1 else next(iter(kept), neutral)


def _given(test: Node, is_true: bool, known: dict[str, Node], domains: Domains) -> tuple[dict[str, Node], Domains]:
    """Return `known`, extended, and `domains`, narrowed, by what the test implies if it is true, or else if false."""
    for part in operands(test if is_true else negated(test), "&&"):
        plain, value = (part.parts[0], FALSE) if part.kind == "!" else (part, TRUE)
        known = {**known, str(plain): value, str(negated(plain)): negated(value)}
        if values := _values(part, domains):
            path, allowed = values
            domains = {**domains, path: domains[path] & allowed}
    return known, domains


def _values(node: Node, domains: Domains) -> tuple[str, frozenset[str]] | None:
    """Return (path of a field with an enum, values for which the node is true); None if it is no such test."""
    if node.kind == "!":
        found = _values(node.parts[0], domains)
        return (found[0], domains[found[0]] - found[1]) if found else None
    if node.kind not in ("in", "==", "!=") or str(node.parts[0]) not in domains:
        return None
    path, other = str(node.parts[0]), node.parts[1]
    if (other.kind != "list") if node.kind == "in" else not other.text.startswith("'"):
        return None
    named = frozenset(map(str, other.parts if other.kind == "list" else [other]))
    return path, domains[path] - named if node.kind == "!=" else domains[path] & named


def _membership(path: str, allowed: frozenset[str], domains: Domains) -> Node:
    """Return the shortest test that a field has one of the allowed values."""
    excluded, field = domains[path] - allowed, parse(path)
    if not (excluded and allowed):
        return TRUE if allowed else FALSE
    forms = [_is_one_of(field, allowed), negated(_is_one_of(field, excluded))]
    return min(forms, key=lambda form: len(str(form)))


def _is_one_of(field: Node, values: frozenset[str]) -> Node:
    named = [Node("atom", text=value) for value in sorted(values)]
    return Node("==", (field, *named)) if len(named) == 1 else Node("in", (field, Node("list", tuple(named))))
