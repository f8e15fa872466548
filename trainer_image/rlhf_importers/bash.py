"""Bash without a run: the words of a script's commands, by the grammar of tree-sitter."""

from __future__ import annotations

import copy
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import ClassVar

from tree_sitter import Node

from rlhf_api.exit_codes import ExitCode
from rlhf_api.problems import one_line
from rlhf_importers.expansion import Expansion
from rlhf_importers.syntax import PLACES, UNKNOWN, calculate, changed_names, is_sum, parse, text_of, total_of, unknown

TESTS = {"[": "(", "[[": "(", "]": ")", "]]": ")", "(": "(", ")": ")", "-n": "'' is not like", "-z": "'' is like"}
TESTS |= {"=": "is like", "==": "is like", "!=": "is not like", "&&": "and", "||": "or", "-a": "and", "-o": "or"}
TESTS |= {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">=", "!": "not"}
HEREDOC = "heredoc_body"
BLOCKS = ("program", "compound_statement", "variable_assignments")
LOOPS = ("while_statement", "for_statement", "c_style_for_statement")
SHELL = ("_functions", "_locals", "_folder", "_has_returned")
"""Attributes of a Script that a subshell has copies of."""


class ConversionError(Exception):
    """Error for a configuration that cannot be read or becomes no valid manifest; its text is one sentence per line."""

    exit_code: ClassVar[ExitCode] = ExitCode.SPEC


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
        values = {name: [value] for name, value in os.environ.items()}
        self._parts = Expansion(values | {"@": [], "0": [source], "BASH_SOURCE": [source]}, self._substitute)
        self._unfollowed: set[str] = set()
        """Variables that are unknown whatever is assigned, such as references."""
        self._functions: dict[str, Node | None] = {}
        self._locals: dict[str, list[str] | None] | None = None
        """Values that the local variables of the current function hide; None outside of functions."""
        self._skipped: list[Node] = []
        self._folder = "."
        self._has_returned = False
        self._printed: list[str] | None = None
        """Texts that the commands of a command substitution print; None outside of substitutions."""

    def read(self, text: str) -> None:
        """Follow a text of bash."""
        root = parse(text)
        if root.has_error:
            wrong = next((node for node in root.children if node.has_error), root)
            place = f"{self.source}: line {wrong.start_point[0] + 1}"
            raise ConversionError(f"{place}: cannot be read as bash: {one_line(text_of(wrong), 60)!r}")
        self._run_all([root])

    def read_quoted(self, is_named: Callable[[str], object]) -> None:
        """Follow each word of a command that is a text with a name that fits, as in `bash -c "python -m ..."`."""
        for text in [word for words in self.commands if words[0] != "echo" for word in words]:
            if len(text.split()) > 1 and any(map(is_named, text.split())):
                self.read(text)

    def read_skipped(self) -> None:
        """Follow the branches of each `if` that were not taken; a note names the line of each."""
        for node in self._skipped[:]:
            self._note(node, "this is followed, though its condition does not hold")
            self._run_all([node])

    def _run_all(self, nodes: Iterable[Node]) -> bool | None:
        outcome: bool | None = True
        for node in self._statements(nodes):
            if not self._has_returned:
                is_apart = node.next_sibling is not None and node.next_sibling.type == "&"
                outcome = self._run_apart([node]) if is_apart else self.STATEMENTS[node.type](self, node)
        return outcome

    def _statements(self, nodes: Iterable[Node]) -> list[Node]:
        return [node for node in nodes if node.type in self.STATEMENTS]

    @contextmanager
    def _subshell(self) -> Iterator[None]:
        """Undo at the end what is set within."""
        values, kept = {**self._parts.values}, {name: copy.copy(vars(self)[name]) for name in SHELL}
        yield
        self._parts.values = values
        vars(self).update(kept)

    def _run_apart(self, nodes: Iterable[Node]) -> bool | None:
        outcome: bool | None = True
        for node in self._statements(nodes):
            with self._subshell():
                outcome = self.STATEMENTS[node.type](self, node)
        return outcome

    def _group(self, node: Node) -> bool | None:
        with self._subshell():
            return self._run_all(node.named_children)

    def _holds(self, tests: list[Node], otherwise: bool = False) -> bool:
        """Whether the last of some statements succeeds; `otherwise` if only a run knows."""
        printed = None if self._printed is None else [*self._printed]
        outcome, self._printed = self._run_all(tests), printed
        if outcome is None and not otherwise:
            self._note(tests[-1], "only a run of the script knows whether this holds; here it does not")
        return otherwise if outcome is None else outcome

    def _note(self, node: Node, sentence: str) -> bool:
        self.notes.append(f"line {node.start_point[0] + 1}: {one_line(text_of(node), 60)}: {sentence}")
        return True

    def _forget(self, node: Node, text: str) -> list[str]:
        """Make the variables unknown that a text of bash sets; add a note on them, and return their names."""
        names = changed_names(text)
        for name in names:
            self._parts.values[name] = [f"{UNKNOWN}{name} of line {node.start_point[0] + 1}{UNKNOWN}"]
        if names or UNKNOWN in text:
            self._note(node, f"only a run of the script knows {' and '.join(names) or 'what this sets'}")
        return names

    def _assign(self, node: Node) -> bool:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        key = text_of(name).partition("[")[0]
        if key in self._unfollowed or PLACES.match(text_of(node)):
            return bool(self._forget(node, f"{key}="))
        old = self._parts.values.get(key) or []
        kept = old if any(child.type == "+=" for child in node.children) else []
        if value and value.type == "array":
            self._parts.values[key] = [*kept, *self._parts.words(value)]
        else:
            self._parts.values[key] = ["".join(kept[:1]) + self._parts.scalar(value), *old[1:]]
        return True

    def _declare(self, node: Node) -> bool:
        """Follow `export` or `local`; a reference (`-n`) and its variable are unknown, as is a counter (`-i`)."""
        keyword, *words = [text_of(each) for each in node.children]
        options = "-g" if keyword in ("export", "readonly") else " ".join(words).partition("=")[0]
        for each in node.named_children:
            name = re.split(r"\W", text_of(each))[0]
            if name and not re.match(r".*-\w*g", options):
                self._hide(name)
            if each.type == "variable_assignment":
                self._assign(each)
            elif each.type not in ("variable_name", "word"):
                self._forget(each, " ".join(self._parts.expand(each)))
            if name and re.match(r".*-\w*[nilu]", options):
                self._forget_always(node, [name, *(self._parts.values.get(name) or [])])
        return True

    def _forget_always(self, node: Node, names: list[str]) -> None:
        self._unfollowed |= set(self._forget(node, "= ".join([*names, ""])))

    def _hide(self, name: str) -> None:
        """Make a variable local to the current function, if there is one."""
        if self._locals is not None:
            self._locals.setdefault(name, self._parts.values.pop(name, None))
            self._parts.values[name] = []

    def _command(self, node: Node) -> bool | None:
        name, *arguments = self._parts.words(node) or ["true"]
        text = " ".join(arguments)
        if name in self._functions:
            return self._call(node, name, arguments)
        if name in self.BUILTINS:
            return self.BUILTINS[name](self, node, arguments)
        if self._printed is not None:
            prints = {"echo": text.removeprefix("-n "), "pwd": self._folder, "dirname": posixpath.dirname(text) or "."}
            self._printed.append(prints.get(name) or UNKNOWN)
        elif [name, *arguments[:1]] == ["printf", "-v"]:
            self._forget(node, f"printf -v {text}")
        else:
            self.commands.append([name, *arguments])
        return {"true": True, "false": False}.get(name)

    def _call(self, node: Node, name: str, arguments: list[str]) -> bool | None:
        """Follow a call of a function. Its local variables, and assignments in front of the call, end with it."""
        outer, self._locals = self._locals, {"@": self._parts.values["@"]}
        for each in node.named_children:
            if each.type == "variable_assignment":
                self._hide(text_of(each.child_by_field_name("name")))
                self._assign(each)
        body, self._parts.values["@"] = self._functions.pop(name), arguments
        outcome = self._run_all([body] if body else [])
        for key, words in self._locals.items():
            self._parts.values.pop(key, None)
            self._parts.values |= {} if words is None else {key: words}
        self._locals, self._has_returned, self._functions[name] = outer, False, body
        return outcome

    def _return(self, _: Node, arguments: list[str]) -> bool | None:
        self._has_returned = self._locals is not None
        return {"0": True, "1": False}.get("".join(arguments))

    def _set_arguments(self, _: Node, words: list[str]) -> bool:
        if words[:1] == ["--"] or (words and words[0][:1] not in "-+"):
            self._parts.values["@"] = words[words[:1] == ["--"] :]
        return True

    def _shift(self, node: Node, arguments: list[str]) -> bool:
        number, words = "".join(arguments) or "1", self._parts.values["@"]
        if not number.isdigit():
            words = [unknown(node)]
        self._parts.values["@"] = words[int(number) :] if number.isdigit() and int(number) <= len(words) else words
        return True

    def _enter(self, node: Node, arguments: list[str]) -> bool:
        self._folder = posixpath.normpath(posixpath.join(self._folder, *arguments[-1:]))
        self._parts.values["PWD"] = [unknown(node)]
        return True

    def _evaluate(self, node: Node, arguments: list[str]) -> None:
        if UNKNOWN in (text := " ".join(arguments)):
            self._forget(node, text)
        else:
            self.read(text)

    def _read(self, node: Node, arguments: list[str]) -> bool:
        """Follow `read -d "" NAME <<END`, which sets a variable to the text up to END; other input is unknown."""
        around = node.parent.named_children if node.parent else []
        texts = [
            self._parts.scalar(part, True) for each in around for part in each.named_children if part.type == HEREDOC
        ]
        if texts and "-d" in arguments:
            self._parts.values[arguments[-1]] = texts
        else:
            self._forget(node, f"read {' '.join(arguments) or 'REPLY MAPFILE'}")
        return True

    def _compute(self, node: Node, arguments: list[str]) -> bool | None:
        """Follow `((...))`, `$((...))` or `let`; a variable that is changed is unknown."""
        text = " ".join(arguments)
        is_change = changed_names(text) and self._forget(node, text)
        total = None if is_change else total_of(text, self._parts.values)
        if self._printed is not None:
            self._printed.append(total or UNKNOWN)
        return total != "0" if total else None

    def _define(self, node: Node) -> bool:
        self._functions[text_of(node.child_by_field_name("name"))] = node.child_by_field_name("body")
        return True

    def _either(self, node: Node) -> bool | None:
        """Follow `a && b` or `a || b`; a program is taken to succeed, but not in a command substitution or a test."""
        first, second = self._statements(node.named_children)
        outcome = self._holds([first], self._printed is None and first.type != "test_command")
        return outcome if outcome == any(child.type == "||" for child in node.children) else self._run_all([second])

    def _unset(self, node: Node) -> bool:
        text = " ".join(self._parts.words(node))
        for name, place in re.findall(r"(?<![-\w])(\w+)\s*(\[[^]]*\])?", text):
            if place:
                self._forget(node, f"{name}=")
            elif "-f" in text or name not in self._parts.values:
                self._functions.pop(name, None)
            else:
                self._parts.values[name] = []
        return True

    def _loop(self, node: Node) -> bool:
        """Follow a loop whose first test fails; the variables that another loop sets are unknown."""
        condition = node.child_by_field_name("condition")
        if node.children[0].type == "while" and condition and self._run_all([condition]) is False:
            return True
        texts, functions = [text_of(node)], dict(self._functions)
        for text in texts:
            called = [name for name in functions if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", text)]
            texts += [text_of(functions.pop(name)) for name in called]
        kept, text = self.notes[:], "\n".join(texts)
        self._forget(node, text)
        self.notes = kept
        if re.search(r"(?:^|[\s;])(?:shift|set)\b", text):
            self._parts.values["@"] = [f"{UNKNOWN}$@{UNKNOWN}"]
        return self._note(node, "a loop is not followed")

    def _choose(self, node: Node) -> bool | None:
        """Follow the branch of an `if` whose condition holds."""
        others = [child for child in node.children if child.type in ("elif_clause", "else_clause")]
        for branch in (node, *others):
            parts = [child for child in branch.children if child not in others]
            then = next((place for place, part in enumerate(parts) if part.type == "then"), 0)
            if not then or self._holds(self._statements(parts[:then])):
                return self._run_all(parts[then:])
            self._skipped += self._statements(parts[then:])
        return True

    def _case(self, node: Node) -> bool | None:
        text = self._parts.scalar(node.child_by_field_name("value"))
        if UNKNOWN in text:
            self._note(node, "only a run of the script knows which case holds; here it is one that holds for any text")
        for item in node.named_children:
            if any(fnmatchcase(text, self._parts.scalar(each)) for each in item.children_by_field_name("value")):
                return self._run_all(item.named_children)
        return True

    def _redirect(self, node: Node) -> bool | None:
        """Follow a command with redirections; a substitution does not get what goes to a file."""
        printed = copy.copy(self._printed)
        outcome = self._run_all(node.named_children)
        is_elsewhere = any(re.match(r"[1&]?>", text_of(each)) for each in node.named_children)
        self._printed = printed if is_elsewhere else self._printed
        return outcome

    def _negate(self, node: Node) -> bool | None:
        outcome = self._run_all(node.named_children)
        return None if outcome is None else not outcome

    def _test(self, node: Node) -> bool | None:
        """Evaluate `[ ... ]` or `[[ ... ]]`; a variable that nobody sets is empty."""
        total = calculate(f"1 if {self._condition(node)} else 0", self._parts.values)
        return None if total is None else total != "0"

    def _condition(self, node: Node) -> str:
        if node.type == "test_command" or node.type.endswith("_expression"):
            return " ".join(map(self._condition, node.children))
        if not node.is_named or node.type == "test_operator":
            return TESTS.get(text_of(node), "unknown")
        text = re.sub(rf"{UNKNOWN}\$\{{?\w+\}}?{UNKNOWN}", "", self._parts.scalar(node))
        is_number = re.fullmatch(r"0|[1-9]\d{0,17}", text)
        return "unknown" if UNKNOWN in text else text if is_number else json.dumps(text)

    def _substitute(self, node: Node) -> str:
        outer, self._printed = self._printed, []
        self._run_all(node.named_children) if is_sum(node) else self._group(node)
        text, self._printed = "\n".join(self._printed).strip(), outer
        return text

    STATEMENTS: ClassVar[Mapping[str, Callable[[Script, Node], bool | None]]] = {
        **dict.fromkeys(BLOCKS, lambda self, node: self._run_all(node.named_children)),
        **dict.fromkeys(LOOPS, _loop),
        "subshell": _group,
        "pipeline": lambda self, node: self._run_apart(node.named_children),
        "declaration_command": _declare,
        "variable_assignment": _assign,
        "command": _command,
        "function_definition": _define,
        "list": _either,
        "if_statement": _choose,
        "case_statement": _case,
        "redirected_statement": _redirect,
        "negated_command": _negate,
        "test_command": _test,
        "unset_command": _unset,
    }
    """Type of a statement -> the method that follows it; other types have no effect on the words of a command."""

    BUILTINS: ClassVar[Mapping[str, Callable[[Script, Node, list[str]], bool | None]]] = {
        **dict.fromkeys(("read", "mapfile", "readarray", "getopts"), _read),
        **dict.fromkeys(("((", "let"), _compute),
        **dict.fromkeys(("cd", "pushd", "popd"), _enter),
        **dict.fromkeys((".", "source"), lambda self, node, _: self._note(node, "the file is not read")),
        "eval": _evaluate,
        "return": _return,
        "set": _set_arguments,
        "shift": _shift,
    }
    """Command of bash that changes the script's state -> the method that follows it."""
