"""Text of bash: parsing, the values of sums, and the names that a text sets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

import tree_sitter_bash
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment
from tree_sitter import Language, Node, Parser

UNKNOWN = "\0"
"""Mark around a part of a word that only a run of the script knows."""
PARSER = Parser(Language(tree_sitter_bash.language()))
CALCULATOR = SandboxedEnvironment(undefined=StrictUndefined)
CALCULATOR.tests["like"] = lambda text, pattern: fnmatchcase(str(text), str(pattern))
SUMS = {"&&": " and ", "||": " or ", "!": " not ", "/": "//"}
"""Operators of a sum in bash -> those of Jinja."""
SUM = re.compile(r"/|&&|\|\||!(?!=)")
ARITHMETIC = re.compile(r"(\$|(?<!for\s)(?<=\s))\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
REWRITTEN = re.compile(r'(\$\()?"\(\(" "(.*?)"(?(1)\))', re.DOTALL)
"""A sum, and its rewritten form, a command named `((`: the grammar takes `$((` in a default for a command."""
NAMED = re.compile(r"\b(?:read|mapfile|readarray|getopts|for|select|unset|printf\s+-v|\w+\s+-\w*n)\s([^;\n|<]*)")
CHANGED = re.compile(
    r"(?<![\w.$-])(?:([A-Za-z_]\w*)(?:\[[^]]*\])?(?:\+=|\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--))|(?:\+\+|--)(\w+))"
)
"""Commands that set the variables that they name, and assignments in bash and in sums."""
PLACES = re.compile(r"\w+(?:\[|\+?=\((?:.*\s)?\[[^]\s]*\]\+?=)", re.DOTALL)
BRACES = re.compile(r"(?<![$\\])\{[^{}\s]*(?:,|\.\.)")
QUOTED = ("string", "raw_string", "ansi_c_string", "simple_expansion", "expansion", "command_substitution")
WORD = re.compile(rf"(?:{UNKNOWN}[^{UNKNOWN}]*{UNKNOWN}|[^\s{UNKNOWN}])+")


def parse(text: str) -> Node:
    """Return the root of the tree of a text of bash, whose sums are rewritten."""
    text = re.sub(r"`#[^`\n]*`|\0|\r(?=\n)", "", text) + "\n"  # a comment in backticks is not in the grammar
    text = ARITHMETIC.sub(lambda found: f'{found[1] and "$("}"((" "{found[2]}"{found[1] and ")"}', text)
    return PARSER.parse(text.encode()).root_node


def is_sum(node: Node) -> bool:
    """Whether a command substitution is a rewritten sum, which is no subshell."""
    return REWRITTEN.fullmatch((node.text or b"").decode()) is not None


def text_of(node: Node | None) -> str:
    """Return the text of a node as the script has it; empty without a node."""
    text = (node.text or b"").decode() if node else ""
    return REWRITTEN.sub(lambda found: f"{'$' * bool(found[1])}(({found[2]}))", text)


def unknown(node: Node) -> str:
    """Return a word for a part of a script that only a run knows."""
    return f"{UNKNOWN}{' '.join(text_of(node).split())}{UNKNOWN}"


def has_braces(node: Node) -> bool:
    """Whether a word has a list in braces outside of its quotes and variables, which bash makes several words of."""
    text = text_of(node)
    for child in [node, *node.named_children]:
        text = text.replace(text_of(child), "") if child.type in QUOTED else text
    return bool(BRACES.search(text))


def changed_names(text: str) -> list[str]:
    """Return the names of the variables that a text of bash may set."""
    pairs = [*CHANGED.findall(text), *((name, "") for words in NAMED.findall(text) for name in words.split())]
    return sorted({name for pair in pairs for name in pair if re.fullmatch(r"[A-Za-z_]\w*", name)})


def total_of(text: str, values: Mapping[str, list[str]]) -> str | None:
    """Return the value of a sum of bash with these variables; None if only a run knows, or Jinja rounds otherwise."""
    used = "".join([text, *(word for name in re.findall(r"\w+", text) for word in values.get(name, []))])
    if re.search("[/%]", text) and "-" in used:
        return None
    return calculate(SUM.sub(lambda found: SUMS[found[0]], text), values)


def calculate(text: str, values: Mapping[str, list[str]]) -> str | None:
    """Return the value of an expression of Jinja with these variables; None if only a run knows."""
    texts = {name: "".join(words[:1]) for name, words in values.items()}
    numbers = {name: int(text) for name, text in texts.items() if re.fullmatch(r"0|-?[1-9]\d{0,17}", text)}
    try:
        return format(CALCULATOR.compile_expression(text)(**numbers), "d")
    except (TemplateError, ArithmeticError, TypeError, ValueError):
        return None


def split(words: list[str], is_quoted: bool) -> list[str]:
    """Return the words of an expansion, which bash splits at spaces outside of quotes."""
    return words if is_quoted else [word for each in words for word in WORD.findall(each)]


def unescape(text: bytes, is_quoted: bool) -> list[str]:
    """Return a text without the backslashes that bash takes away; no word for no text."""
    pattern = r'\\(["$`\\\n])' if is_quoted else r"\\(.|\n)"
    return [re.sub(pattern, lambda found: found[1].strip("\n"), text.decode())] if text else []
