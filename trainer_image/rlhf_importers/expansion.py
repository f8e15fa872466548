"""Expansion of the words of a bash script with its variables."""

from __future__ import annotations

import re
from collections.abc import Callable

from tree_sitter import Node

from rlhf_importers.syntax import UNKNOWN, has_braces, split, text_of, unescape, unknown

ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
EXPANSION = re.compile(r"\$\{?([!#](?=\w))?(\w+|[@*#?$!-]|)(?:\[(\d+|[@*])\])?(:?[-=+?]|\})?")
NO_WORDS = ("comment", "file_redirect", "heredoc_redirect", "herestring_redirect", "variable_assignment")


class Expansion:
    """Variables of a script, and the words that its parts become; `substitute` returns what a substitution prints."""

    def __init__(self, values: dict[str, list[str]], substitute: Callable[[Node], str]) -> None:
        self.values = values
        self._substitute = substitute

    def words(self, node: Node) -> list[str]:
        """Return the words of a command or of an array."""
        parts = [each for each in node.named_children if each.type not in NO_WORDS]
        return [word for each in parts for word in ([unknown(each)] if has_braces(each) else self.expand(each))]

    def scalar(self, node: Node | None, is_quoted: bool = False) -> str:
        """Return the one text that a part of a command becomes; empty without a part."""
        if node and node.type in ("simple_expansion", "expansion", "command_substitution"):
            is_quoted = True
        return " ".join(self.expand(node, is_quoted)) if node else ""

    def expand(self, node: Node, is_quoted: bool = False) -> list[str]:
        """Return the words that a part of a command becomes."""
        match node.type:
            case "string":
                return self._glue(node, True, 1, -1)
            case "raw_string":
                return [text_of(node)[1:-1]]
            case "ansi_c_string":
                return [re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[1]), text_of(node)[2:-1])]
            case "simple_expansion" | "expansion":
                return self._variable(node, is_quoted)
            case "command_substitution":
                text = self._substitute(node)
                return [unknown(node)] if UNKNOWN in text or not text else split([text], is_quoted)
        return self._glue(node, is_quoted)

    def _glue(self, node: Node, is_quoted: bool, begin: int = 0, end: int | None = None) -> list[str]:
        """Return the words of the bytes from `begin` to `end` of a node; its variables are expanded."""
        text, at = node.text or b"", begin
        parts: list[list[str]] = []
        for child in node.named_children:
            start = child.start_byte - node.start_byte
            if start >= at:
                parts += [unescape(text[at:start], is_quoted), self.expand(child, is_quoted)]
                at = child.end_byte - node.start_byte
        words = [] if parts or not is_quoted else [""]
        for first, *others in filter(None, [*parts, unescape(text[at:end], is_quoted)]):
            words = [*words[:-1], "".join(words[-1:]) + first, *others]
        return words

    def _variable(self, node: Node, is_quoted: bool) -> list[str]:
        found = next(EXPANSION.finditer(text_of(node)))
        kind, name, index, sign = found.groups(default="")
        values = self._values_of(name, index)
        is_known = values is not None and not kind and (sign or found.end() == len(found.string))
        if sign[-1:] in ("-", "=", "+"):
            return self._choose_value(node, found, values, is_quoted)
        return self._joined(values or [], name, index, is_quoted) if is_known else [unknown(node)]

    def _choose_value(self, node: Node, found: re.Match[str], values: list[str] | None, is_quoted: bool) -> list[str]:
        """Return the words of `${NAME:-TEXT}`, `${NAME:=TEXT}` or `${NAME:+TEXT}`."""
        _, name, index, sign = found.groups(default="")
        is_set = values not in ((None, [], [""]) if ":" in sign else (None, []))
        if is_set and sign.endswith("+") and UNKNOWN in "".join(values or ()):
            return [unknown(node)]
        if is_set == sign.endswith("+"):
            words = self._glue(node, is_quoted, found.end(), -1)
            self.values |= {name: [" ".join(words)]} if "=" in sign else {}
            return split(words, is_quoted or any(each.type.endswith("string") for each in node.named_children))
        return self._joined(values or [], name, index, is_quoted) if is_set else []

    def _joined(self, values: list[str], name: str, index: str, is_quoted: bool) -> list[str]:
        between = "".join(self.values.get("IFS") or [" "])[:1] if is_quoted else " "
        return split([between.join(values)] if "*" in (index, name) else values, is_quoted)

    def _values_of(self, name: str, index: str) -> list[str] | None:
        """Return the values of a variable, or a list of the one at an index; None if only a run knows them."""
        if name == "#":
            return [str(len(self.values["@"]))]
        if name.isdigit() and name != "0":
            return self.values["@"][int(name) - 1 :][:1] or None
        values = self.values.get("@" if name == "*" else name)
        if not values or {"@", "*"} & {name, index}:
            return values
        place = int(index or 0)
        return None if UNKNOWN in "".join(values[:place]) else values[place:][:1]
