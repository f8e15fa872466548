"""Reader of bash scripts, which runs nothing: the words of a script's commands, by the grammar of tree-sitter."""

from __future__ import annotations

import json
import os
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from fnmatch import fnmatchcase
from typing import ClassVar

from tree_sitter import Node

from rlhf_api.problems import Problem, SpecError, one_line
from rlhf_importers.scalars import UNKNOWN
from rlhf_importers.syntax import State, below, calculate, parse, text_of, unknown

TESTS = {"[": "(", "[[": "(", "]": ")", "]]": ")", "(": "(", ")": ")", "-n": "'' is not like", "-z": "'' is like"}
TESTS |= {"=": "is like", "==": "is like", "!=": "is not like", "&&": "and", "||": "or", "-a": "and", "-o": "or"}
TESTS |= {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">=", "!": "not"}
PLACES = re.compile(r"\w+(?:\[|\+?=\((?:.*\s)?\[[^]\s]*\]\+?=)", re.DOTALL)
"""Pattern of an assignment to an element of an array."""
BLOCKS = ("program", "compound_statement", "subshell", "pipeline", "redirected_statement", "variable_assignments")
OPPOSITE = {True: False, False: True, None: None}
SETTERS = ("read", "mapfile", "readarray", "getopts", "let", "eval")
SECRET = re.compile("(?i)key|token|secret|password|credential")
"""Pattern of the names of environment variables whose values stay out of manifests."""


class Script:
    """Bash script, followed as far as options need it; a variable that other statements may change becomes unknown.

    `commands` holds the words of each command, in the order of their start. `notes` are sentences on what was guessed.
    A word has UNKNOWN around each part that only a run knows. A method for a statement returns whether the statement
    succeeds, or None if only a run knows.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.commands: list[list[str]] = []
        self.notes: list[str] = []
        known = {name: [value] for name, value in os.environ.items() if not SECRET.search(name)}
        self._state = State(ChainMap(known | {"0": [source], "BASH_SOURCE": [source], ".": ["."]}), self.notes)
        self._skipped: list[Node] = []
        self._has_returned = False

    def read(self, text: str) -> None:
        """Follow a text of bash. Raises SpecError for a text that is not bash."""
        root = parse(text)
        if root.has_error:
            wrong = next((node for node in root.children if node.has_error), root)
            place = f"{self.source}: line {wrong.start_point[0] + 1}"
            raise SpecError([Problem(place, f"cannot be read as bash: {one_line(text_of(wrong), 60)!r}")])
        self._run_all([root])

    def read_quoted(self, is_named: Callable[[str], object]) -> None:
        """Follow each word that is a script and names a program (`is_named`), as in `bash -c "python -m ..."`."""
        for text in [word for words in self.commands if words[0] != "echo" for word in words]:
            if len(text.split()) > 1 and any(map(is_named, text.split())):
                self.read(re.sub(rf"{UNKNOWN}([^{UNKNOWN}$`][^{UNKNOWN}]*){UNKNOWN}", r"$(\1)", text))

    def read_skipped(self) -> None:
        """Follow the branches of each `if` that were not taken; a note names the line of each."""
        for node in self._skipped[:]:
            self._state.note(node, "this is followed, though its condition does not hold")
            self._run_all([node])

    def _run_all(self, nodes: Iterable[Node]) -> bool | None:
        outcome: bool | None = True
        for node in self._statements(nodes):
            around = (node.parent.type if node.parent else "", node.next_sibling.type if node.next_sibling else "")
            is_apart = node.type == "subshell" or around[0] == "pipeline" or around[1] == "&"
            if not self._has_returned:
                outcome = self._run_apart(node) if is_apart else self.STATEMENTS[node.type](self, node)
        return outcome

    def _statements(self, nodes: Iterable[Node]) -> list[Node]:
        return [node for node in nodes if node.type in self.STATEMENTS]

    def _run_apart(self, node: Node) -> bool | None:
        """Follow a statement in a subshell."""
        outer, self._state = self._state, self._state.copy()
        outcome = self.STATEMENTS[node.type](self, node)
        self._state, self._has_returned = outer, False
        return outcome

    def _holds(self, tests: list[Node], otherwise: bool = False) -> bool:
        """Whether the last of some statements succeeds; `otherwise` if only a run knows."""
        outcome = self._run_all(tests)
        if outcome is None and not otherwise:
            self._state.note(tests[-1], "only a run of the script knows whether this holds; here it does not")
        return otherwise if outcome is None else outcome

    def _assign(self, node: Node, scope: MutableMapping[str, list[str]] | None = None) -> bool:
        """Follow an assignment, to a variable of `scope` if one is given."""
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        key = text_of(name).partition("[")[0]
        old = self._state.values.get(key) or []
        kept = old if any(child.type == "+=" for child in node.children) else []
        if value and value.type == "array":
            words = [*kept, *self._state.words(value)]
        else:
            words = ["".join(kept[:1]) + self._state.scalar(value), *old[1:]]
        if scope is None:
            self._state.assign(key, words)
        else:
            scope[key] = words
        if PLACES.match(text_of(node)):
            self._state.forget(node, f"{key}=")
        return True

    def _declare(self, node: Node) -> bool:
        """Follow `export`, `local` and the like."""
        options = " ".join(text_of(each) for each in node.named_children if each.type == "word")
        is_global = text_of(node.children[0]) in ("export", "readonly")
        if re.search(r"-\w*[nilu]", options) and not is_global:
            return self._refer(node)
        scope = None if is_global or "g" in options else self._state.values.maps[0]
        for each in node.named_children:
            if each.type == "variable_assignment":
                self._assign(each, scope)
            elif each.type == "variable_name" and scope is not None:
                scope.setdefault(text_of(each), [])
            elif each.type not in ("variable_name", "word"):
                self._state.forget(each, " ".join(self._state.expand(each)))
        return True

    def _refer(self, node: Node) -> bool:
        """Make all variables that `declare -n`, `-i`, `-l` or `-u` names unknown from here on."""
        words = [word for each in node.named_children for word in self._state.expand(each)]
        self._state.references |= set(self._state.forget(node, re.sub(r"\W+", "= ", f"{words} ")))
        return True

    def _command(self, node: Node) -> bool | None:
        name, *arguments = self._state.words(node) or ["true"]
        if name in self._state.functions:
            return self._call(node, name, arguments)
        if name == "((":
            total = self._state.total(node, " ".join(arguments))
            return None if total is None else total != "0"
        if name in self.BUILTINS:
            return self.BUILTINS[name](self, node, arguments)
        if name in SETTERS or [name, *arguments[:1]] == ["printf", "-v"]:
            self._set(node, arguments)
        self.commands.append([name, *arguments])
        return {"true": True, "false": False}.get(name)

    def _call(self, node: Node, name: str, arguments: list[str]) -> bool | None:
        """Follow a call of a function. Its local variables, and assignments in front of the call, end with it."""
        scope: dict[str, list[str]] = {"@": arguments}
        body = self._state.functions.pop(name)
        for each in node.named_children:
            if each.type == "variable_assignment":
                self._assign(each, scope)
        self._state.values.maps.insert(0, scope)
        outcome = self._run_all([body] if body else [])
        del self._state.values.maps[0]
        self._state.functions.setdefault(name, body)
        self._has_returned = False
        return outcome

    def _return(self, _: Node, arguments: list[str]) -> bool | None:
        self._has_returned = len(self._state.values.maps) > 1
        return {"0": True, "1": False}.get("".join(arguments))

    def _enter(self, node: Node, arguments: list[str]) -> bool:
        self._state.assign("PWD", [unknown(node)])
        self._state.assign(".", [below(*self._state.values["."], *arguments) or unknown(node)])
        return True

    def _set_arguments(self, _: Node, words: list[str]) -> bool:
        if words[:1] == ["--"] or (words and words[0][:1] not in "-+"):
            self._state.assign("@", words[words[:1] == ["--"] :])
        return True

    def _shift(self, node: Node, arguments: list[str]) -> bool:
        number, words = "".join(arguments) or "1", self._state.values.get("@", [])
        if not number.isdigit() or UNKNOWN in "".join(words):
            self._state.forget(node, "shift")
        elif words and int(number) <= len(words):
            self._state.assign("@", words[int(number) :])
        return True

    def _set(self, node: Node, arguments: list[str]) -> None:
        """Make what a command sets unknown; but `read -d "" NAME <<END` sets NAME to the text up to END."""
        parts = [part for each in node.parent.named_children for part in each.named_children] if node.parent else []
        texts = [self._state.scalar(part, True) for part in parts if part.type == "heredoc_body"]
        if texts and "-d" in arguments:
            self._state.assign(arguments[-1], texts)
        else:
            self._state.forget(node, " ".join(self._state.words(node)))

    def _unset(self, node: Node) -> bool:
        words = self._state.words(node)
        for word in words:
            if "-f" in words or word not in self._state.values:
                self._state.functions.pop(word, None)
            else:
                self._state.assign(word, [])
        if "[" in "".join(words):
            self._state.forget(node, text_of(node).replace("[", "= "))
        return True

    def _define(self, node: Node) -> bool:
        self._state.functions[text_of(node.child_by_field_name("name"))] = node.child_by_field_name("body")
        return True

    def _either(self, node: Node) -> bool | None:
        """Follow `a && b` or `a || b`; a program is taken to succeed, a test to fail."""
        first, second = self._statements(node.named_children)
        outcome = self._holds([first], first.type != "test_command")
        return outcome if outcome == any(child.type == "||" for child in node.children) else self._run_all([second])

    def _loop(self, node: Node) -> bool:
        """Follow a loop whose first test fails; the variables that another loop sets are unknown."""
        condition = node.child_by_field_name("condition")
        if node.children[0].type != "while" or not condition or self._run_all([condition]) is not False:
            self._state.forget(node, text_of(node), "a loop is not followed")
        return True

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
        text = self._state.scalar(node.child_by_field_name("value"))
        if UNKNOWN in text:
            why = "only a run of the script knows which case holds; here it is one that holds for any text"
            self._state.note(node, why)
        for item in node.named_children:
            if any(fnmatchcase(text, self._state.scalar(each)) for each in item.children_by_field_name("value")):
                return self._run_all(item.named_children)
        return True

    def _test(self, node: Node) -> bool | None:
        """Evaluate `[ ... ]` or `[[ ... ]]`; an unset variable is empty."""
        total = calculate(f"1 if {self._condition(node)} else 0", {})
        return None if total is None else total != "0"

    def _condition(self, node: Node) -> str:
        """Return a part of a test as an expression of Jinja."""
        if node.type == "test_command" or node.type.endswith("_expression"):
            return " ".join(map(self._condition, node.children))
        if not node.is_named or node.type == "test_operator":
            return TESTS.get(text_of(node), "unknown")
        text = re.sub(rf"{UNKNOWN}\$\{{?\w+\}}?{UNKNOWN}", "", self._state.scalar(node))
        is_number = re.fullmatch(r"0|[1-9]\d{0,17}", text)
        return "unknown" if UNKNOWN in text else text if is_number else json.dumps(text)

    STATEMENTS: ClassVar[Mapping[str, Callable[[Script, Node], bool | None]]] = {
        **dict.fromkeys(BLOCKS, lambda self, node: self._run_all(node.named_children)),
        **dict.fromkeys(("while_statement", "for_statement", "c_style_for_statement"), _loop),
        "declaration_command": _declare,
        "variable_assignment": _assign,
        "command": _command,
        "function_definition": _define,
        "list": _either,
        "if_statement": _choose,
        "case_statement": _case,
        "negated_command": lambda self, node: OPPOSITE[self._run_all(node.named_children)],
        "test_command": _test,
        "unset_command": _unset,
    }
    """Type of a statement -> the method that follows it; other types have no effect on the words of a command."""

    BUILTINS: ClassVar[Mapping[str, Callable[[Script, Node, list[str]], bool | None]]] = {
        **dict.fromkeys(("cd", "pushd", "popd"), _enter),
        **dict.fromkeys((".", "source"), lambda self, node, _: self._state.note(node, "the file is not read")),
        "return": _return,
        "set": _set_arguments,
        "shift": _shift,
    }
    """Command of bash that changes the script's state -> the method that follows it."""
