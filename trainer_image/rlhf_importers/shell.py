"""Shell scripts and YAML of other projects: the words of a script's commands, without a run of it, flags and values."""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, ClassVar

import tree_sitter_bash
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment
from tree_sitter import Language, Node, Parser

from rlhf_api.exit_codes import ExitCode
from rlhf_api.kubectl_yaml import read
from rlhf_api.problems import Problem, SpecError, one_line

UNKNOWN = "\0"
"""Mark around a part of a word that only a run of the script knows."""
PARSER = Parser(Language(tree_sitter_bash.language()))
CALCULATOR = SandboxedEnvironment(undefined=StrictUndefined)
CALCULATOR.tests["like"] = lambda text, pattern: fnmatchcase(str(text), str(pattern))
TESTS = {"[": "(", "[[": "(", "]": ")", "]]": ")", "(": "(", ")": ")", "-n": "'' is not like", "-z": "'' is like"}
TESTS |= {"=": "is like", "==": "is like", "!=": "is not like", "&&": "and", "||": "or", "-a": "and", "-o": "or"}
TESTS |= {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">=", "!": "not"}
SUMS = {"&&": " and ", "||": " or ", "!": " not ", "/": "//"}
"""Words of a test, and operators of a sum, in bash -> those of Jinja."""
ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
SUM = re.compile(r"/|&&|\|\||!(?!=)")
ARITHMETIC = re.compile(r"(\$|(?<!for\s)(?<=\s))\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
EXPANSION = re.compile(r"\$\{?([!#](?=\w))?(\w+|[@*#?$!-]|)(?:\[(\d+|[@*])\])?(:?[-=+?]|\})?")
OPTION = re.compile(r"--[A-Za-z]|\+{0,2}\w+[\w.]*\.\w+=")
BLOCKS = ("program", "compound_statement", "subshell", "pipeline", "declaration_command", "variable_assignments")
LOOPS = ("while_statement", "for_statement", "c_style_for_statement")
NO_WORDS = ("comment", "file_redirect", "heredoc_redirect", "herestring_redirect", "variable_assignment")


class ConversionError(Exception):
    """Error for a configuration that cannot be read or becomes no valid manifest; its text is one sentence per line."""

    exit_code: ClassVar[ExitCode] = ExitCode.SPEC


def only_document(text: str, source: str) -> Any:
    """Return the only document of a YAML text; None for an empty text. SpecError for bad YAML or several documents."""
    documents = read(text, f"{source}: ")
    if len(documents) > 1:
        raise SpecError([Problem(source, f"holds {len(documents)} YAML documents, expected one")])
    return documents[0] if documents else None


def scalar(text: str) -> Any:
    """Return a word of a script as YAML reads it: a number, a boolean, a list or text."""
    try:
        return text if UNKNOWN in text else read(text, "")[0]
    except (SpecError, IndexError):
        return text


def flags(script: list[str]) -> dict[str, Any]:
    """Return values of flags (`--name value ...`, `--name=value`) by name: True for none, a list for several."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in script:
        if re.match(r"--[A-Za-z]", word):
            name, is_set, value = word[2:].partition("=")
            found[name] = [value] if is_set else []
        elif name:
            found[name].append(word)
    values = {name: [scalar(word) for word in given] for name, given in found.items()}
    return {name: True if not each else each[0] if len(each) == 1 else each for name, each in values.items()}


def call(text: str, source: str, program: str) -> tuple[list[str], list[str]]:
    """Return the words of a script's last call of a program, from its name on, and sentences on what was guessed.

    `program` is a pattern of the name. All words of the script are returned if it has no such call.
    """
    script, is_named = Script(source), re.compile(program).fullmatch
    script.read(text)
    if not any(any(map(is_named, words)) for words in script.commands):
        script.read_quoted(is_named)
    calls = [words for words in script.commands if any(map(is_named, words))]
    if not calls:
        return list(chain.from_iterable(script.commands)), script.notes
    if len(calls) > 1:
        script.notes.append(f"the script starts {len(calls)} trainings; the last one is read")
    lost = [words[0] for words in script.commands if words not in calls and OPTION.match(words[0])]
    script.notes += [f"{word} is no part of a command: a comment or an empty line ends the call" for word in lost]
    begin = next(place for place, word in enumerate(calls[-1]) if is_named(word))
    return calls[-1][begin:], list(dict.fromkeys(script.notes))


class Script:
    """State of a bash script as far as it is known without a run.

    `commands` holds the words of each command, in the order of their start. `notes` are sentences on what was guessed.
    A word has UNKNOWN around each part that only a run knows. A method for a statement returns whether the statement
    succeeds, or None if only a run knows.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.commands: list[list[str]] = []
        self.notes: list[str] = []
        self._values: dict[str, list[str] | None] = {name: [value] for name, value in os.environ.items()}
        self._values |= {"@": [], "#": ["0"], "0": [source], "BASH_SOURCE": [source]}
        self._functions: dict[str, Node | None] = {}
        self._folder = "."
        self._printed: list[str] | None = None
        """Texts that the commands of a command substitution print; None outside of substitutions."""

    def read(self, text: str) -> None:
        """Follow a text of bash. The grammar takes `$((` in a default for a command, so `let` stands for sums."""
        text = re.sub(r"`#[^`\n]*`|\0|\r(?=\n)", "", text) + "\n"  # a comment in backticks is not in the grammar
        text = ARITHMETIC.sub(lambda found: f'{found[1] and "$("}let "{found[2]}"{found[1] and ")"}', text)
        root = PARSER.parse(text.encode()).root_node
        if root.has_error:
            wrong = next((node for node in root.children if node.has_error), root)
            place = f"{self.source}: line {wrong.start_point[0] + 1}"
            raise ConversionError(f"{place}: cannot be read as bash: {one_line(_text(wrong), 60)!r}")
        self._run_all([root])

    def read_quoted(self, is_named: Callable[[str], object]) -> None:
        """Follow each word of a command that is a text with a name that fits, as in `bash -c "python -m ..."`."""
        for text in [word for words in self.commands if words[0] != "echo" for word in words]:
            if len(text.split()) > 1 and any(map(is_named, text.split())):
                self.read(text)

    def _run_all(self, nodes: Iterable[Node]) -> bool | None:
        outcome: bool | None = True
        for node in self._statements(nodes):
            outcome = self.STATEMENTS[node.type](self, node)
        return outcome

    def _statements(self, nodes: Iterable[Node]) -> list[Node]:
        return [node for node in nodes if node.type in self.STATEMENTS]

    def _holds(self, tests: list[Node], otherwise: bool = False) -> bool:
        """Whether the last of some statements succeeds; `otherwise` if only a run knows."""
        printed = None if self._printed is None else [*self._printed]
        outcome, self._printed = self._run_all(tests), printed
        if outcome is None and not otherwise:
            self._note(tests[-1], "only a run of the script knows whether this holds; here it does not")
        return otherwise if outcome is None else outcome

    def _note(self, node: Node, sentence: str) -> bool:
        self.notes.append(f"line {node.start_point[0] + 1}: {one_line(_text(node), 60)}: {sentence}")
        return True

    def _assign(self, node: Node) -> bool:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        key = _text(name).partition("[")[0]
        is_array = value is not None and value.type == "array"
        new = self._words(value) if value and is_array else [self._scalar(value)]
        if any(child.type == "+=" for child in node.children):
            old = self._values.get(key) or []
            new = [*old, *new] if is_array else ["".join(old[:1]) + new[0]]
        self._values[key] = [_unknown(node)] if name and name.type == "subscript" else new
        return True

    def _command(self, node: Node) -> bool | None:
        name, *arguments = self._words(node) or ["true"]
        text = " ".join(arguments)
        if name in self._functions:
            return self._call(name, arguments)
        total = self._calculate(SUM.sub(lambda found: SUMS[found[0]], text)) if name == "let" else None
        if [name, *arguments[:1]] == ["set", "--"]:
            self._values |= _arguments(arguments[1:])
        elif name == "cd":
            self._folder = posixpath.normpath(posixpath.join(self._folder, *arguments[-1:]))
        elif self._printed is not None:
            prints = {"echo": text, "let": total, "pwd": self._folder, "dirname": posixpath.dirname(text) or "."}
            self._printed.append(prints.get(name) or UNKNOWN)
        elif name != "let":
            self.commands.append([name, *arguments])
        return total != "0" if total else {"true": True, "false": False, "cd": True}.get(name)

    def _call(self, name: str, arguments: list[str]) -> bool | None:
        own = _arguments(arguments)
        outer = {key: self._values.get(key) for key in own}
        body = self._functions.pop(name)
        self._values |= own
        outcome = self._run_all([body] if body else [])
        self._values |= outer
        self._functions[name] = body
        return outcome

    def _define(self, node: Node) -> bool:
        self._functions[_text(node.child_by_field_name("name"))] = node.child_by_field_name("body")
        return True

    def _either(self, node: Node) -> bool | None:
        """Follow `a && b` or `a || b`; a program is taken to succeed, but not in a command substitution or a test."""
        first, second = self._statements(node.named_children)
        outcome = self._holds([first], self._printed is None and first.type != "test_command")
        return outcome if outcome == any(child.type == "||" for child in node.children) else self._run_all([second])

    def _unset(self, node: Node) -> bool:
        self._values |= {word: [] for word in self._words(node)}
        return True

    def _choose(self, node: Node) -> bool | None:
        """Follow the branch of an `if` whose condition holds."""
        others = [child for child in node.children if child.type in ("elif_clause", "else_clause")]
        for branch in (node, *others):
            parts = [child for child in branch.children if child not in others]
            then = next((place for place, part in enumerate(parts) if part.type == "then"), 0)
            if not then or self._holds(self._statements(parts[:then])):
                return self._run_all(parts[then:])
        return True

    def _case(self, node: Node) -> bool | None:
        text = self._scalar(node.child_by_field_name("value"))
        if UNKNOWN in text:
            self._note(node, "only a run of the script knows which case holds; here it is one that holds for any text")
        for item in node.named_children:
            if any(fnmatchcase(text, self._scalar(each)) for each in item.children_by_field_name("value")):
                return self._run_all(item.named_children)
        return True

    def _redirected(self, node: Node) -> bool | None:
        """Follow a command with redirections; `read NAME <<END` sets a variable to the text up to END."""
        body = node.child_by_field_name("body")
        words = self._words(body) if body and body.type == "command" else []
        if words[:1] != ["read"]:
            return self._run_all(node.named_children)
        parts = [each for redirect in node.named_children for each in redirect.named_children]
        self._values[words[-1]] = [self._scalar(each, True) for each in parts if each.type == "heredoc_body"]
        return True

    def _negate(self, node: Node) -> bool | None:
        outcome = self._run_all(node.named_children)
        return None if outcome is None else not outcome

    def _test(self, node: Node) -> bool | None:
        """Evaluate `[ ... ]` or `[[ ... ]]`; a variable that nobody sets is empty."""
        total = self._calculate(f"1 if {self._condition(node)} else 0")
        return None if total is None else total != "0"

    def _condition(self, node: Node) -> str:
        if node.type == "test_command" or node.type.endswith("_expression"):
            return " ".join(map(self._condition, node.children))
        if not node.is_named or node.type == "test_operator":
            return TESTS.get(_text(node), "unknown")
        text = re.sub(rf"{UNKNOWN}\$\{{?\w+\}}?{UNKNOWN}", "", self._scalar(node))
        is_number = re.fullmatch(r"0|[1-9]\d{0,17}", text)
        return "unknown" if UNKNOWN in text else text if is_number else json.dumps(text)

    def _calculate(self, text: str) -> str | None:
        """Return the value of an expression of Jinja with the script's numbers, None if only a run knows."""
        texts = {name: "".join(values or ()) for name, values in self._values.items()}
        numbers = {name: int(text) for name, text in texts.items() if re.fullmatch(r"-?\d{1,18}", text)}
        try:
            return format(CALCULATOR.compile_expression(text)(**numbers), "d")
        except (TemplateError, ArithmeticError, TypeError, ValueError):
            return None

    def _words(self, node: Node) -> list[str]:
        return [word for each in node.named_children if each.type not in NO_WORDS for word in self._expand(each)]

    def _scalar(self, node: Node | None, is_quoted: bool = False) -> str:
        return " ".join(self._expand(node, is_quoted)) if node else ""

    def _expand(self, node: Node, is_quoted: bool = False) -> list[str]:
        """Return the words that a part of a command becomes."""
        match node.type:
            case "string":
                return self._glue(node, True, 1, -1)
            case "raw_string":
                return [_text(node)[1:-1]]
            case "ansi_c_string":
                return [re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[1]), _text(node)[2:-1])]
            case "simple_expansion" | "expansion":
                return self._variable(node, is_quoted)
            case "command_substitution":
                outer, self._printed = (self._printed, self._folder, {**self._values}), []
                self._run_all(node.named_children)
                text = "\n".join(self._printed).strip()
                self._printed, self._folder, self._values = outer
                return [_unknown(node)] if UNKNOWN in text or not text else _split([text], is_quoted)
        return self._glue(node, is_quoted)

    def _glue(self, node: Node, is_quoted: bool, begin: int = 0, end: int | None = None) -> list[str]:
        """Return the words of the bytes from `begin` to `end` of a node; its variables are expanded."""
        text, at = node.text or b"", begin
        parts: list[list[str]] = []
        for child in node.named_children:
            start = child.start_byte - node.start_byte
            if start >= at:
                parts += [_unescaped(text[at:start], is_quoted), self._expand(child, is_quoted)]
                at = child.end_byte - node.start_byte
        words = [] if parts or not is_quoted else [""]
        for first, *others in filter(None, [*parts, _unescaped(text[at:end], is_quoted)]):
            words = [*words[:-1], "".join(words[-1:]) + first, *others]
        return words

    def _variable(self, node: Node, is_quoted: bool) -> list[str]:
        found = next(EXPANSION.finditer(_text(node)))
        kind, name, index, sign = found.groups(default="")
        values = self._values_of(name, index)
        if sign[-1:] in ("-", "=", "+"):
            is_set = values not in ((None, [], [""]) if ":" in sign else (None, []))
            if is_set == sign.endswith("+"):
                words = self._glue(node, is_quoted, found.end(), -1)
                self._values |= {name: [" ".join(words)]} if "=" in sign else {}
                return words
            values = values if is_set else []
        if values is None or kind or not (sign or found.end() == len(found.string)):
            return [_unknown(node)]
        between = "".join(self._values.get("IFS") or [" "])[:1] if is_quoted else " "
        return _split([between.join(values)] if "*" in (index, name) else values, is_quoted)

    def _values_of(self, name: str, index: str) -> list[str] | None:
        """Return the values of a variable, or a list of the one at an index; None if only a run knows them."""
        values = self._values.get("@" if name == "*" else name)
        return values[int(index or 0) :][:1] if values and not {"@", "*"} & {name, index} else values

    STATEMENTS: ClassVar[Mapping[str, Callable[[Script, Node], bool | None]]] = {
        **dict.fromkeys(BLOCKS, lambda self, node: self._run_all(node.named_children)),
        **dict.fromkeys(LOOPS, lambda self, node: self._note(node, "a loop is not followed")),
        "variable_assignment": _assign,
        "command": _command,
        "function_definition": _define,
        "list": _either,
        "if_statement": _choose,
        "case_statement": _case,
        "redirected_statement": _redirected,
        "negated_command": _negate,
        "test_command": _test,
        "unset_command": _unset,
    }
    """Type of a statement -> the method that follows it; other types have no effect on the words of a command."""


def _text(node: Node | None) -> str:
    return (node.text or b"").decode() if node else ""


def _arguments(words: list[str]) -> dict[str, list[str] | None]:
    return {"@": words, "#": [str(len(words))], **{str(n): [word] for n, word in enumerate(words, 1)}}


def _unknown(node: Node) -> str:
    source = re.sub(r'\$\(let "(.*?)"\)', r"$((\1))", " ".join(_text(node).split()))
    return f"{UNKNOWN}{source}{UNKNOWN}"


def _split(values: list[str], is_quoted: bool) -> list[str]:
    return values if is_quoted else [word for value in values for word in value.split()]


def _unescaped(text: bytes, is_quoted: bool) -> list[str]:
    pattern = r'\\(["$`\\\n])' if is_quoted else r"\\(.|\n)"
    return [re.sub(pattern, lambda found: found[1].strip("\n"), text.decode())] if text else []
