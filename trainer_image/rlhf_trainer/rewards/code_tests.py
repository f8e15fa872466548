"""Tests of code in the forms of public data sets, and the run of a program through them."""

from __future__ import annotations

import ast
import builtins
import io
import json
import re
import sys
import unittest
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cached_property, partial
from importlib.util import find_spec
from operator import methodcaller
from types import CodeType, SimpleNamespace
from typing import Any

Test = Callable[["Program"], bool]
"""Function (program) -> whether the program passes; it may also raise an exception."""


def read_tests(value: Any) -> list[Test]:
    """Return the tests in a row's value; ValueError with the reason if it has none that can be read.

    A text is Python code, or JSON or a Python literal of the other forms: a list of tests, or a mapping with inputs and
    outputs (APPS and TACO: `inputs`, `outputs`; LiveCodeBench: `input`, `output`; CodeContests: lists of those).
    """
    value = unpacked(value)
    if isinstance(value, list | tuple):
        found = [test for each in value for test in read_tests(each)]
    else:
        found = _cases(value) if isinstance(value, Mapping) else [_runnable(str(value))] if value else []
    if not found:
        raise ValueError("holds no test")
    return found


def unpacked(value: Any, starts: tuple[str, ...] = ("[", "{")) -> Any:
    """Return the value of a text that is JSON or a Python literal and starts so; any other value as it is."""
    for read in (json.loads, ast.literal_eval) if isinstance(value, str) and value.strip().startswith(starts) else ():
        with suppress(ValueError, SyntaxError, RecursionError):
            return read(value.strip())
    return value


def _cases(cases: Mapping[str, Any]) -> list[Test]:
    name = next((cases[key] for key in ("fn_name", "func_name", "entry_point") if cases.get(key)), "")
    is_call = bool(name) or cases.get("testtype") == "functional"
    given, wanted = unpacked(cases.get("inputs")), unpacked(cases.get("outputs"))
    if given is None or wanted is None:
        given, wanted = cases.get("input"), cases.get("output")
        are_lists = isinstance(given, list) and isinstance(wanted, list) and len(given) == len(wanted)
        given, wanted = (given, wanted) if are_lists and not is_call else ([given], [wanted])
    if None in (*given, *wanted) or len(given) != len(wanted):
        raise ValueError(f"holds a mapping with {', '.join(map(str, cases))[:80]}, expected inputs and as many outputs")
    made = partial(_call_of, str(name).rpartition(".")[2]) if is_call else _run_of
    return [made(*each) for each in zip(given, wanted, strict=True)]


def _call_of(name: str, given: Any, wanted: Any) -> Test:
    """Return the test of a call, of any function if `name` is empty; APPS may have the result in a list of its own."""
    named = given if isinstance(given, dict) else {}
    lines = [] if named else str(given).splitlines()
    arguments = given if isinstance(given, list) else [unpacked(line, ("",)) for line in lines]
    right = [wanted, unpacked(wanted, ("",)), *(wanted if isinstance(wanted, list) and len(wanted) == 1 else [])]
    results = methodcaller("results", name, lambda function: function(*deepcopy(arguments), **deepcopy(named)))
    return lambda program: any(each in right for each in results(program))


def _run_of(given: Any, wanted: Any) -> Test:
    """Return the test of a program that reads standard input; the words of its lines are compared."""
    texts = ["\n".join(map(str, each)) if isinstance(each, list) else str(each) for each in (given, wanted)]
    return lambda program: _are_same(_words(program.output(texts[0])), _words(texts[1]))


def _are_same(found: list[list[str]], wanted: list[list[str]]) -> bool:
    pairs = [pair for lines in zip(found, wanted, strict=False) for pair in zip(*lines, strict=False)]
    return [*map(len, found)] == [*map(len, wanted)] and all(_is_same(*pair) for pair in pairs)


def _is_same(word: str, wanted: str) -> bool:
    """Whether words are the same; a number in place of one with a decimal point may differ by a millionth."""
    with suppress(ValueError):
        if "." in wanted:
            return abs(float(word) - float(wanted)) <= 1e-6 * max(1.0, abs(float(wanted)))
    return word == wanted


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def _runnable(text: str) -> Test:
    """Return the test in Python code, without imports of the program and the start of a test runner."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"holds a test that is no Python: {error}") from error
    if not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in ast.walk(tree)):
        raise ValueError("holds a test that checks nothing")
    modules = list[str]()
    for node in list(tree.body):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and node.args.args:
            raise ValueError(f"holds a test function {node.name} with parameters, which nothing gives")
        is_program = isinstance(node, ast.ImportFrom) and (node.level or _is_missing(str(node.module)))
        if isinstance(node, ast.Import) and (gone := [each for each in node.names if _is_missing(each.name)]):
            modules += [each.asname or each.name for each in gone]
            node.names = [each for each in node.names if each not in gone]
            is_program = not node.names
        if is_program or ast.unparse(node).startswith(("unittest.main(", "pytest.main(")):
            tree.body.remove(node)
    return partial(_check_code, compile(tree, "test", "exec"), modules)


def _is_missing(module: str) -> bool:
    return find_spec(module.partition(".")[0]) is None


class Program:
    """A response's code. Each run puts back what the code may replace to be judged in another way."""

    def __init__(self, code: str) -> None:
        self._code, self._set = compile(code, "response", "exec"), setattr
        owners: list[Any] = [builtins, sys.modules[__name__], json, json.JSONEncoder, json.JSONDecoder, Program]
        owners += [unittest.TestCase, unittest.TestSuite, unittest.TestLoader]
        self._kept = [(each, *item) for each in owners for item in vars(each).items() if callable(item[1])]
        self._modules, self.builtins = dict(sys.modules), dict(vars(builtins))

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that runs some of the code."""
        kept, modules, put = self._kept, self._modules, self._set
        try:
            return function(*arguments)
        finally:
            for owner, name, value in kept:
                put(owner, name, value)
            sys.modules.update(modules)

    @cached_property
    def names(self) -> dict[str, Any]:
        """Names that the code defines, but for those of built-in functions."""
        defined: dict[str, Any] = {"__name__": "response"}
        self.run(exec, self._code, defined)
        return {name: value for name, value in defined.items() if name not in self.builtins}

    def results(self, name: str, call: Callable[[Any], Any]) -> list[Any]:
        """Return call(function) for the code's function of this name, or for all functions if it is empty.

        Results are JSON values, as a class of the code's own may equal anything; those of failed calls are left out.
        """
        own, found = dict(self.names), []
        if "Solution" in own:
            made = self.run(own["Solution"])
            own |= {each: getattr(made, each) for each in vars(own["Solution"]) if not each.startswith("_")}
        for each in [own[name]] if name else own.values():
            if callable(each) and getattr(each, "__module__", "") == "response":
                with suppress(Exception):
                    found.append(json.JSONDecoder().decode(json.JSONEncoder().encode(self.run(call, each))))
        return found

    def output(self, given: str) -> str:
        """Run the code as a program with the standard input `given`; return what it prints."""
        before, written = (sys.stdin, sys.stdout), io.BytesIO()
        sys.stdin, sys.stdout = io.TextIOWrapper(io.BytesIO(given.encode())), io.TextIOWrapper(written)
        printed = sys.stdout
        try:
            self.run(exec, self._code, {"__name__": "__main__", "open": _open})
        except SystemExit as left:
            if left.code:
                raise
        finally:
            sys.stdin, sys.stdout = before
        printed.flush()
        return written.getvalue().decode()


def _open(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    """Open a file as the built-in function does; file number 0 is the standard input of the program."""
    given = sys.stdin.buffer if "b" in mode else sys.stdin
    return given if file == 0 else open(file, mode, *arguments, **options)  # noqa: PTH123 a number is no path


def _check_code(code: CodeType, modules: Sequence[str], program: Program) -> bool:
    """Run the test, then what it defines: test functions, classes of tests, and functions of a `candidate`.

    modules: names by which the test imports the program as a module.
    """
    before = program.names
    names = {**before, **dict.fromkeys(modules, SimpleNamespace(**before)), "__builtins__": program.builtins}
    program.run(exec, code, names)
    for name, each in list(names.items()):
        if before.get(name) is each:
            continue
        if isinstance(each, type) and issubclass(each, unittest.TestCase):
            program.run(unittest.TestLoader().loadTestsFromTestCase(each).debug)
        elif isinstance(each, type):
            for method in filter(re.compile("test").match, dir(each)):
                made = each()
                program.run(getattr(made, "setup_method", lambda: None))
                program.run(getattr(made, method))
        elif getattr(each, "__code__", code).co_varnames[:1] == ("candidate",):
            assert program.results("", each)
        elif name.startswith("test") and callable(each):
            program.run(each)
    return True


def passed_tests(code: str, tests: Sequence[Test]) -> int:
    """Return the number of tests that a program passes; SyntaxError or ValueError if it is no Python."""
    program, passed = Program(code), 0
    for test in tests:
        with suppress(BaseException):  # SystemExit as well
            passed += test(program)
    return passed
