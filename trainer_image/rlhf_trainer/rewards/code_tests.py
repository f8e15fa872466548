"""Tests of code in the forms of public data sets, and the run of a program through them."""

import ast
import builtins
import json
import os
import re
import sys
import unittest
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache, cached_property, partial
from operator import methodcaller
from pathlib import Path
from threading import Thread
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from _pytest.skipping import evaluate_skip_marks

Test = Callable[["Program"], bool]
"""Function (program) -> whether the program passes; it may also raise an exception."""
JUDGING = re.compile(rf"(json|math|re|unittest|pluggy|pytest|_pytest|{re.escape(__name__)})(\.|\Z)")
"""Pattern of the modules that judge a program; they are restored after each run of its code."""
SKIPPED = "__unittest_skip__"
"""Attribute of tests that unittest's decorators skip."""
NOT_NEEDED = (
    "cacheprovider doctest faulthandler junitxml legacypath logging pastebin terminal "
    "threadexception unraisableexception"
)
PYTEST_OPTIONS = [
    *("-c", os.devnull, "--noconftest", "--disable-plugin-autoload", "--capture=no", "--assert=plain"),
    *("-o", "python_classes=*", "-o", "python_functions=test*", *(f"-pno:{name}" for name in NOT_NEEDED.split())),
]
"""Options of pytest for tests that are in memory, in a process that may write no file."""


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
    """Return the value of a text that is JSON or a Python literal with one of `starts`; any other value as it is."""
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
        given, wanted = (given, wanted) if _are_cases(given, wanted) and not is_call else ([given], [wanted])
    if not _are_cases(given, wanted) or None in (*given, *wanted):
        raise ValueError(f"holds a mapping with {', '.join(map(str, cases))[:80]}, expected inputs and as many outputs")
    made = partial(_call_of, str(name).rpartition(".")[2]) if is_call else _run_of
    return [made(*each) for each in zip(given, wanted, strict=True)]


def _are_cases(given: Any, wanted: Any) -> bool:
    return isinstance(given, list) and isinstance(wanted, list) and len(given) == len(wanted)


def _call_of(name: str, given: Any, wanted: Any) -> Test:
    """Return the test that calls the function `name` (empty: any function); APPS may wrap the result in a list."""
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


def _are_same(found: list[str], wanted: list[str]) -> bool:
    return len(found) == len(wanted) and all(map(_is_same, found, wanted))


def _is_same(word: str, wanted: str) -> bool:
    """Whether two words are the same; if `wanted` has a decimal point, they may differ by 1e-6 (relative above 1)."""
    with suppress(ValueError):
        if "." in wanted:
            return abs(float(word) - float(wanted)) <= 1e-6 * max(1.0, abs(float(wanted)))
    return word == wanted


def _words(text: str) -> list[str]:
    """Return the words of a text, with a line break after those of each line."""
    return [word for line in text.splitlines() if line.strip() for word in (*line.split(), "\n")]


def _runnable(text: str) -> Test:
    """Return the test that runs Python code, without its calls of test runners; ValueError for an unusable test."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"holds a test that is no Python: {error}") from error
    nodes = [*ast.walk(tree)]
    if not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in nodes):
        raise ValueError("holds a test that checks nothing")
    _require_parameters([node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)])
    if any(isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test") for node in tree.body):
        raise ValueError("holds an asynchronous test, which nothing runs")
    tree.body = [node for node in tree.body if not ast.unparse(node).startswith(("unittest.main(", "pytest.main("))]
    return partial(_check_code, compile(tree, "test", "exec"))


def _require_parameters(defined: Sequence[ast.FunctionDef | ast.ClassDef]) -> None:
    """Raise ValueError for a test function with a parameter that pytest, a fixture or a decorator does not give."""
    decorators = {each: [*map(ast.unparse, each.decorator_list)] for each in defined}
    given = {"self", "candidate", "capsys", "monkeypatch", "request"}
    for each, texts in decorators.items():
        given |= {each.name} if "fixture" in str(texts) else set()
        names = [call.args[0] for call in each.decorator_list if isinstance(call, ast.Call) and call.args]
        given |= set(re.findall(r"\w+", " ".join(map(ast.unparse, names))) if "parametrize" in str(texts) else ())
    for each in defined:
        if isinstance(each, ast.ClassDef) or "patch" in str(decorators[each]) or not each.name.startswith("test"):
            continue
        names_of_parameters = [argument.arg for argument in (*each.args.posonlyargs, *each.args.args)]
        required = names_of_parameters[: len(names_of_parameters) - len(each.args.defaults)]
        if not given.issuperset(required):
            raise ValueError(f"holds a test function {each.name} with parameters, which nothing gives")


@cache
def _judges() -> tuple[tuple[tuple[Any, str, Any], ...], tuple[tuple[type, frozenset[str]], ...]]:
    """Return the state of JUDGING modules: (module or class, name, value) by attribute, and (class, names) by class.

    The state is read once, before the first program runs.
    """
    modules = [each for name, each in sys.modules.items() if JUDGING.match(name)]
    found = [value for each in modules for value in vars(each).values() if isinstance(value, type)]
    classes = [each for each in dict.fromkeys(found) if JUDGING.match(each.__module__)]
    kept = [(each, *item) for each in (builtins, *modules, *classes) for item in vars(each).items()]
    return tuple(kept), tuple((each, frozenset(vars(each))) for each in classes)


class Program:
    """A response's code. After each run the JUDGING modules and built-ins are restored, which the code may change."""

    def __init__(self, code: str) -> None:
        self._code, self._set = compile(code, "response", "exec"), setattr
        self._modules, self.builtins = dict(sys.modules), dict(vars(builtins))
        self._kept, self._names = _judges()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that runs some of the code."""
        kept, modules, put = self._kept, self._modules, self._set
        try:
            return function(*arguments)
        finally:
            for owner, name, value in kept:
                if owner.__dict__.get(name) is not value:
                    put(owner, name, value)
            for added in ((each, name) for each, names in self._names for name in vars(each).keys() - names):
                delattr(*added)
            sys.modules.update(modules)

    @cached_property
    def names(self) -> dict[str, Any]:
        """Names that the code defines, without those that would hide a built-in."""
        defined: dict[str, Any] = {"__name__": "response"}
        self.run(exec, self._code, defined)
        return {name: value for name, value in defined.items() if name not in self.builtins}

    def results(self, name: str, call: Callable[[Any], Any]) -> list[Any]:
        """Return call(function) for the code's function of this name, or for all functions if it is empty.

        Results are copied through JSON: an object of the code's own class may equal anything. Failed calls give none.
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
        """Run the code as a program with the standard input `given`; return what it prints.

        File descriptors 0 and 1 are pipes meanwhile, as some programs use them directly for speed.
        """
        before, kept, printed = (sys.stdin, sys.stdout), (os.dup(0), os.dup(1)), bytearray()
        (source, feed), (drain, sink) = os.pipe(), os.pipe()
        threads = [Thread(target=_feed, args=(feed, given.encode())), Thread(target=_drain, args=(drain, printed))]
        for each in threads:
            each.start()
        try:
            _replace({source: 0, sink: 1})
            sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
            self.run(_run_program, self._code)
        finally:
            sys.stdin, sys.stdout = before
            _replace(dict(zip(kept, (0, 1), strict=True)))
        for each in threads:
            each.join()
        return bytes(printed).decode()


def _replace(files: Mapping[int, int]) -> None:
    """Move file descriptors to other numbers: number -> new number."""
    for number, new in files.items():
        os.dup2(number, new)
        os.close(number)


def _feed(file: int, content: bytes) -> None:
    with suppress(BrokenPipeError), os.fdopen(file, "wb") as pipe:
        pipe.write(content)


def _drain(file: int, content: bytearray) -> None:
    with os.fdopen(file, "rb") as pipe:
        content += pipe.read()


def _run_program(code: CodeType) -> None:
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as left:
        if left.code:
            raise
    sys.stdout.flush()


def _import(defined: dict[str, Any], load: Callable[..., Any], name: str, *others: Any) -> Any:
    """Import a module by `load`, Python's __import__; if it or a name in it is missing, return the program's names."""
    wanted = (others[2:3] and others[2]) or ()
    with suppress(ImportError):
        module = load(name, *others)
        if all(each == "*" or hasattr(module, each) for each in wanted):
            return module
    program = SimpleNamespace(**defined)
    for part in () if wanted else reversed(name.split(".")[1:]):
        program = SimpleNamespace(**defined | {part: program})
    return program


def _check_code(code: CodeType, program: Program) -> bool:
    """Run a test and the tests that it defines (`candidate` functions, unittest, pytest); return whether all pass."""
    before, tests = program.names, ModuleType("test")
    importer = partial(_import, before, program.builtins["__import__"])
    names = {**before, "__builtins__": {**program.builtins, "__import__": importer}}
    program.run(exec, code, names)
    for name, each in [item for item in names.items() if before.get(item[0]) is not item[1]]:
        if isinstance(each, type) and issubclass(each, unittest.TestCase):
            program.run(_run_unittest, each)
        elif getattr(each, "__code__", code).co_varnames[:1] == ("candidate",):
            assert program.results("", each)
        else:
            setattr(tests, name, each)
    if not any(name.lower().startswith("test") for item in vars(tests).items() for name in _names_of_tests(*item)):
        return True
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):  # they would add options
        os.environ.pop(name, None)
    plugin = ModuleRun(program, tests)
    with suppress(OSError):  # pytest ends with os.chdir, which the sandbox refuses
        pytest.main(PYTEST_OPTIONS, plugins=[plugin])
    return plugin.has_passed


def _run_unittest(case: type[unittest.TestCase]) -> None:
    """Run the tests of a class, except those that a decorator skips; an exception ends the run."""
    names = unittest.TestLoader().getTestCaseNames(case)
    kept = [name for name in names if not any(getattr(each, SKIPPED, False) for each in (case, getattr(case, name)))]
    unittest.TestSuite(map(case, kept)).debug()


def _names_of_tests(name: str, value: Any) -> Sequence[str]:
    return dir(value) if isinstance(value, type) else [name] if callable(value) else []


class ModuleRun:
    """Plugin of pytest that runs the tests of a module in memory; `has_passed` says whether all have passed."""

    def __init__(self, program: Program, module: ModuleType) -> None:
        self._program, self._module, self.has_passed = program, module, False

    def pytest_collection(self, session: pytest.Session) -> bool:
        """Collect and run the tests, except those marked `xfail` or skipped; an exception ends the run."""
        made = pytest.Module.from_parent(session, path=Path(__file__), nodeid="test")
        made.obj = self._module
        with suppress(BaseException):
            every = session.genitems(made)
            items = [each for each in every if not (each.get_closest_marker("xfail") or evaluate_skip_marks(each))]
            for item in items:
                self._program.run(_run_item, item)
            self.has_passed = bool(items) and not session.testsfailed
        return True


def _run_item(item: pytest.Item) -> None:
    hooks = item.ihook
    try:
        hooks.pytest_runtest_setup(item=item)
        hooks.pytest_runtest_call(item=item)
    finally:
        hooks.pytest_runtest_teardown(item=item, nextitem=None)


def passed_tests(code: str, tests: Sequence[Test]) -> int:
    """Return the number of tests that a program passes; SyntaxError or ValueError if it is no Python."""
    program, passed = Program(code), 0
    for test in tests:
        with suppress(BaseException):  # SystemExit as well
            passed += test(program)
    return passed
