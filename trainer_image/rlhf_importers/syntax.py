"""Text of bash: parsing, the names that a text sets, and the words that it becomes."""

from __future__ import annotations

import posixpath
import re
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import tree_sitter_bash
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment
from tree_sitter import Language, Node, Parser

from rlhf_api.problems import one_line
from rlhf_importers.scalars import UNKNOWN

PARSER = Parser(Language(tree_sitter_bash.language()))
CALCULATOR = SandboxedEnvironment(undefined=StrictUndefined)
CALCULATOR.tests["like"] = lambda text, pattern: fnmatchcase(str(text), str(pattern))
SUMS = {"&&": " and ", "||": " or ", "!": " not ", "/": "//"}
"""Operator of bash's arithmetic -> Jinja's operator."""
ARITHMETIC = re.compile(r"(\$|(?<!for\s)(?<=\s))\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
REWRITTEN = re.compile(r'(\$\()?"\(\(" "(.*?)"(?(1)\))', re.DOTALL)
"""Patterns of arithmetic, and of the command `((` that replaces it: the grammar misreads `$((` in a default value."""
NAMED = re.compile(r"\b(?:read|mapfile|readarray|getopts|for|select|unset|printf\s+-v|\w+\s+-\w*n)\s([^;\n|<]*)")
CHANGED = re.compile(
    r"(?<![\w.$-])(?:([A-Za-z_]\w*)(?:\[[^]]*\])?(?:\+=|\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--))|(?:\+\+|--)(\w+))"
)
"""Patterns of commands that set the variables that they name, and of assignments, also in arithmetic."""
BRACES = re.compile(r"(?<![$\\])\{[^{}\s]*(?:,|\.\.)")
QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
EXPANSION = re.compile(r"\$\{?([!#](?=\w))?(\w+|[@*#?$!-]|)(?:\[(\d+|[@*])\])?(:?[-=+?]|\})?")
WORD = re.compile(rf"(?:{UNKNOWN}[^{UNKNOWN}]*{UNKNOWN}|[^\s{UNKNOWN}])+")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
VARIABLE = ("simple_expansion", "expansion", "command_substitution")
NO_WORDS = ("comment", "file_redirect", "heredoc_redirect", "herestring_redirect", "variable_assignment")


def parse(text: str) -> Node:
    """Return the root of the tree of a text of bash, whose arithmetic expressions are rewritten."""
    text = re.sub(r"`#[^`\n]*`|\0|\r(?=\n)", "", text) + "\n"  # a comment in backticks is not in the grammar
    text = ARITHMETIC.sub(lambda found: f'{found[1] and "$("}"((" "{found[2]}"{found[1] and ")"}', text)
    return PARSER.parse(text.encode()).root_node


def text_of(node: Node | None) -> str:
    """Return the text of a node as the script has it; empty without a node."""
    text = (node.text or b"").decode() if node else ""
    return REWRITTEN.sub(lambda found: f"{'$' * bool(found[1])}(({found[2]}))", text)


def unknown(node: Node) -> str:
    """Return a word for a part of a script that only a run knows."""
    return f"{UNKNOWN}{' '.join(text_of(node).split())}{UNKNOWN}"


def changed_names(text: str) -> list[str]:
    """Return the names of the variables that a text of bash may set, and `@` if it changes the arguments."""
    found = [name for pair in CHANGED.findall(text) for name in pair]
    found += [name for words in NAMED.findall(text) for name in words.split()]
    names = {name for name in found if re.fullmatch(r"[A-Za-z_]\w*", name)}
    return sorted(names | set("@" if re.search(r"(?:^|[\s;])(?:shift|set)\b", text) else ""))


def calculate(text: str, values: Mapping[str, list[str]]) -> str | None:
    """Return the value of an expression of Jinja with these variables; None if only a run knows."""
    texts = {name: "".join(words[:1]) for name, words in values.items()}
    numbers = {name: int(text) for name, text in texts.items() if re.fullmatch(r"0|[1-9]\d{0,17}", text)}
    try:
        return format(CALCULATOR.compile_expression(text)(**numbers), "d")
    except (TemplateError, ArithmeticError, TypeError, ValueError):
        return None


def below(folder: str, *places: str) -> str:
    """Return the folder that `cd` with these words leads to from a folder; empty if only a run knows."""
    names = [place for place in places if not place.startswith("-")]
    path = posixpath.join(folder, *names)
    return posixpath.normpath(path) if len(names) == 1 and UNKNOWN not in path else ""


def _commands(node: Node) -> list[Node]:
    """Return the statements of `$(A)` or `$(A && B)`, without the redirections of A."""
    parts = node.named_children
    if [part.type for part in parts] == ["list"] and "||" not in text_of(node):
        first, *_, last = parts[0].named_children
        parts = [first.named_children[0] if first.type == "redirected_statement" else first, last]
    return parts


def _split(words: list[str], is_quoted: bool) -> list[str]:
    return words if is_quoted else [word for each in words for word in WORD.findall(each)]


def _unescape(text: bytes, is_quoted: bool) -> list[str]:
    """Return a text without the backslashes that bash takes away; no word for no text."""
    pattern = r'\\(["$`\\\n])' if is_quoted else r"\\(.|\n)"
    return [re.sub(pattern, lambda found: found[1].strip("\n"), text.decode())] if text else []


@dataclass
class State:
    """Variables and functions of a script, and the words that parts of it become.

    `values` has the local variables of the current function first, and those of the script last. `@` holds the
    arguments, but not those of the script itself, and `.` the folder. `references` are variables that stay unknown.
    """

    values: ChainMap[str, list[str]]
    notes: list[str]
    functions: dict[str, Node | None] = field(default_factory=dict)
    references: set[str] = field(default_factory=set)

    def copy(self) -> State:
        """Return the state of a subshell, whose changes end with it."""
        values = ChainMap(*({**each} for each in self.values.maps))
        return State(values, self.notes, {**self.functions}, {*self.references})

    def note(self, node: Node, sentence: str) -> bool:
        """Add a sentence on a part of the script."""
        self.notes.append(f"line {node.start_point[0] + 1}: {one_line(text_of(node), 60)}: {sentence}")
        return True

    def assign(self, name: str, words: list[str]) -> None:
        """Set a variable in the innermost scope that defines it, else as a variable of the script."""
        scope = next((each for each in self.values.maps if name in each), self.values.maps[-1])
        scope[name] = [f"{UNKNOWN}${name}{UNKNOWN}"] if name in self.references else words

    def forget(self, node: Node, text: str, why: str = "") -> list[str]:
        """Make the variables unknown that a text, or a function in it, may set. Add a note; return their names."""
        texts, functions = [text], {**self.functions}
        for each in texts:
            called = functions.keys() & set(re.findall(r"[\w.:-]+", each))
            texts += [text_of(functions.pop(name)) for name in called]
        names = changed_names("\n".join(texts))
        for name in names:
            self.assign(name, [f"{UNKNOWN}{name} of line {node.start_point[0] + 1}{UNKNOWN}"])
        if why or names or UNKNOWN in text:
            self.note(node, why or f"only a run of the script knows {' and '.join(names) or 'what this sets'}")
        return names

    def total(self, node: Node, text: str) -> str | None:
        """Return the value of arithmetic; None if only a run knows, it sets a variable, or Jinja rounds otherwise."""
        if changed_names(text):
            self.forget(node, text)
        elif not re.search(r"[/%].*-|-.*[/%]", text):
            return calculate(re.sub(r"/|&&|\|\||!(?!=)", lambda found: SUMS[found[0]], text), self.values)
        return None

    def words(self, node: Node) -> list[str]:
        """Return the words of a command or of an array."""
        parts = [each for each in node.named_children if each.type not in NO_WORDS]
        braced = {each for each in parts if BRACES.search(QUOTED.sub("", text_of(each)))}  # braces make several words
        return [word for each in parts for word in ([unknown(each)] if each in braced else self.expand(each))]

    def scalar(self, node: Node | None, is_quoted: bool = False) -> str:
        """Return the one text that a part of a command becomes; empty without a part."""
        return " ".join(self.expand(node, is_quoted or node.type in VARIABLE)) if node else ""

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
                text = self._substitution(node)
                return [unknown(node)] if UNKNOWN in text or not text else _split([text], is_quoted)
        return self._glue(node, is_quoted)

    def _glue(self, node: Node, is_quoted: bool, begin: int = 0, end: int | None = None) -> list[str]:
        """Return the words of the bytes from `begin` to `end` of a node; its variables are expanded."""
        text, at = node.text or b"", begin
        parts: list[list[str]] = []
        for child in node.named_children:
            start = child.start_byte - node.start_byte
            if start >= at:
                parts += [_unescape(text[at:start], is_quoted), self.expand(child, is_quoted)]
                at = child.end_byte - node.start_byte
        words = [] if parts or not is_quoted else [""]
        for first, *others in filter(None, [*parts, _unescape(text[at:end], is_quoted)]):
            words = [*words[:-1], "".join(words[-1:]) + first, *others]
        return words

    def _substitution(self, node: Node) -> str:
        """Return the value of arithmetic, or the folder that `pwd`, `cd X && pwd` or `dirname X` prints; else ''."""
        folder = "".join(self.values["."])
        match [self.words(each) if each.type == "command" else [] for each in _commands(node)]:
            case [["((", text]]:
                return self.total(node, text) or ""
            case [["pwd", *_]]:
                return folder
            case [["cd", *places], ["pwd", *_]]:
                return below(folder, *places)
            case [["dirname", place] | ["dirname", "--", place]] if UNKNOWN not in place:
                return posixpath.dirname(place) or "."
        return ""

    def _variable(self, node: Node, is_quoted: bool) -> list[str]:
        found = next(EXPANSION.finditer(text_of(node)))
        kind, name, index, sign = found.groups(default="")
        values = self._values_of(name, index)
        if sign[-1:] in ("-", "=", "+"):
            return self._choose_value(node, found, values, is_quoted)
        is_known = values is not None and not kind and (sign or found.end() == len(found.string))
        return self._joined(values or [], name + index, is_quoted) if is_known else [unknown(node)]

    def _choose_value(self, node: Node, found: re.Match[str], values: list[str] | None, is_quoted: bool) -> list[str]:
        """Return the words of `${NAME:-TEXT}`, `${NAME:=TEXT}` or `${NAME:+TEXT}`."""
        _, name, index, sign = found.groups(default="")
        is_set = values not in ((None, [], [""]) if ":" in sign else (None, []))
        if is_set and sign[-1] == "+" and UNKNOWN in "".join(values or ()):
            return [unknown(node)]
        if is_set != (sign[-1] == "+"):
            return self._joined(values or [], name + index, is_quoted)
        words = self._glue(node, is_quoted, found.end(), -1)
        if sign[-1] == "=":
            self.assign(name, [" ".join(words)])
        return _split(words, is_quoted or any(each.type.endswith("string") for each in node.named_children))

    def _joined(self, values: list[str], name: str, is_quoted: bool) -> list[str]:
        between = "".join(self.values.get("IFS") or [" "])[:1] if is_quoted else " "
        return _split([between.join(values)] if "*" in name else values, is_quoted)

    def _values_of(self, name: str, index: str) -> list[str] | None:
        """Return the values of a variable, or a list of the one at an index; None if the variable is unset."""
        if name in ("@", "*") and "@" not in self.values:
            self.notes.append("the script's own arguments are not known")
        key = "@" if re.fullmatch(r"[@*#]|[1-9]\d*", name) else name
        values = self.values.get(key, [] if name in ("@", "*", "#") else None)
        if values is None or {"@", "*"} & {name, index}:
            return values
        place = len(values) if name == "#" else int(index or 0) if key == name else int(name) - 1
        if UNKNOWN in "".join(values[:place]):
            return [f"{UNKNOWN}${{{name}}}{UNKNOWN}"]
        return [str(place)] if name == "#" else values[place:][:1]
