"""Tests and golds as public data sets have them: each is understood, or its row is bad before the first step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rlhf_api.job import Job
from rlhf_trainer.data.loaders import PromptLoader
from rlhf_trainer.rewards.code_tests import passed_tests, read_tests
from rlhf_trainer.rewards.verifiers import OPTIONS, score
from rlhf_trainer.workers.expectations import find_faults
from tests.each import each_case
from tests.trainer.jobs import job
from tests.trainer.unit.data.conftest import cache, chat, plain  # noqa: F401 fixtures

RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return 4\n"
PROGRAM = "import sys\na, b = map(int, sys.stdin.readline().split())\nprint(a + b)\n"
METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
UNITTEST = """
import unittest
from solution import add

class AddTest(unittest.TestCase):
    def test_it(self):
        self.assertEqual(add(2, 3), 5)

if __name__ == "__main__":
    unittest.main()
"""
FAST_PROGRAM = "a, b = open(0, 'rb').read().split()\nprint(int(a) + int(b))\n"
MODULE = "import solution as s, math\n\ndef test_add():\n    assert math.isclose(s.add(2, 3), 5)\n"
BY_NUMBER = """
import os, sys
f = sys.stdin.fileno()
os.write(sys.stdout.fileno(), b"%d" % sum(map(int, os.read(f, os.fstat(f).st_size or 99).split())))
"""
AT_ONCE = "print(sum(map(int, open(0).read().split())))\nexit()"
INSIDE = """
import pkg.solution

def test_add():
    from solution import add as plus
    import your_module as other
    assert plus(2, 3) == other.add(1, 4) == pkg.solution.add(4, 1) == 5
"""
PARAMETERS = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize(("a", "b", "total"), [(2, 3, 5), pytest.param(0, 1, 1, id="small")])
def test_add(a, b, total):
    assert add(a, b) == total

@pytest.mark.skip
def test_more():
    assert False
"""
FIXTURES = """
import pytest

@pytest.fixture
def numbers():
    yield 2, 3

@pytest.fixture
def total(numbers):
    return add(*numbers)

def test_add(total, capsys):
    print(total)
    assert capsys.readouterr().out == "5\\n"
    with pytest.raises(TypeError, match="unsupported"):
        add(None, 1)
    assert add(0.1, 0.2) == pytest.approx(0.3)
"""
SETUP = """
import unittest

class AddTest(unittest.TestCase):
    def setUp(self):
        self.sum = 5

    def tearDown(self):
        del self.sum

    def test_it(self):
        self.assertEqual(add(2, 3), self.sum)
"""
PYTEST_CLASS = """
class TestAdd:
    def setup_method(self, method):
        self.sum = 5

    def test_it(self):
        assert add(2, 3) == self.sum
"""
LEFT_OUT = """
import unittest
import pytest

@pytest.mark.skipif(True, reason="it needs a network")
def test_slow():
    assert False

class AddTest(unittest.TestCase):
    @unittest.skip("it needs a network")
    def test_slow(self):
        self.fail()

    def test_it(self):
        self.assertEqual(add(2, 3), 5)

def test_add():
    assert add(2, 3) == 5
"""
PATCHED = """
from unittest.mock import patch

@patch("math.floor", return_value=5)
def test_add(floor):
    import math
    assert add(2, 3) == math.floor(4.5)
"""
IN_A_CLASS = "class TestOuter:\n    class TestInner:\n        def test_add(self):\n            assert add(2, 3) == 5\n"
FORMS: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "APPS, a program": ({"inputs": ["2 3\n"], "outputs": ["5\n"]}, (PROGRAM,)),
    "CodeContests": ({"input": ["2 3\n", "1 1\n"], "output": ["5\n", "2\n"]}, (PROGRAM, FAST_PROGRAM)),
    "files by their numbers": ({"inputs": ["2 3\n", "1 4\n"], "outputs": ["5\n", "5\n"]}, (BY_NUMBER, AT_ONCE)),
    "imports inside of functions": (INSIDE, (RIGHT,)),
    "parameters of pytest": (PARAMETERS, (RIGHT,)),
    "fixtures of pytest": (FIXTURES, (RIGHT,)),
    "set up by unittest": (SETUP, (RIGHT,)),
    "a number that is no integer": ({"inputs": ["2 3\n"], "outputs": ["5.00\n"]}, (PROGRAM,)),
    "APPS as JSON": ('{"inputs": ["2 3\\n"], "outputs": ["5 "], "fn_name": null}', (PROGRAM,)),
    "APPS, a function": ('{"fn_name": "add", "inputs": [[2, 3]], "outputs": [[5]]}', (RIGHT, METHOD)),
    "a method by its name": ({"fn_name": "Solution.add", "inputs": [[2, 3]], "outputs": [5]}, (METHOD,)),
    "arguments by name": ({"fn_name": "add", "inputs": [{"b": 3, "a": 2}], "outputs": [5]}, (RIGHT, METHOD)),
    "LiveCodeBench, a program": ('[{"input": "2 3", "output": "5", "testtype": "stdin"}]', (PROGRAM,)),
    "LiveCodeBench, a function": ('[{"input": "2\\n3", "output": "5", "testtype": "functional"}]', (RIGHT, METHOD)),
    "assertions as JSON": ('["assert add(2, 3) == 5", "assert add(0, 1) == 1"]', (RIGHT,)),
    "assertions as a Python literal": ("['assert add(2, 3) == 5']", (RIGHT,)),
    "functions of pytest": ("def test_add():\n    assert add(2, 3) == 5\n", (RIGHT,)),
    "a module": (MODULE, (RIGHT,)),
    "a class of pytest": (PYTEST_CLASS, (RIGHT,)),
    "a class of unittest": (UNITTEST, (RIGHT,)),
    "tests that are left out": (LEFT_OUT, (RIGHT,)),
    "a function that is patched": (PATCHED, (RIGHT,)),
    "a class in a class": (IN_A_CLASS, (RIGHT,)),
    "HumanEval's check": ("def check(candidate):\n    assert candidate(2, 3) == 5\n", (RIGHT, METHOD)),
    "HumanEval's check, called": ("def check(candidate):\n    assert candidate(2, 3) == 5\ncheck(add)", (RIGHT,)),
}
IN_A_SANDBOX = (
    "APPS, a program",
    "APPS, a function",
    "assertions as JSON",
    "fixtures of pytest",
    "a class of unittest",
)
"""Forms that different judges run; the fast tests run the others without a sandbox only."""
CHEATS = (
    "import unittest\nunittest.TestCase.assertEqual = lambda *_: None\ndef add(a, b):\n    return 4\n",
    "import unittest\ndef add(a, b):\n    raise unittest.SkipTest\n",
    "class Same:\n    def __eq__(self, _):\n        return True\n",
    "def add(a, b):\n    import builtins\n    builtins.any = lambda _: True\n    return 4\n",
    "import rlhf_trainer.rewards.code_tests as t\nt._words = lambda _: 0\nt._check_code = lambda *_: True\n",
    "import _pytest.python as p\np.Function.runtest = lambda _: None\ndef add(a, b):\n    return 4\n",
    "import _pytest.python as p\np.Function.obj = property(lambda _: lambda: None)\ndef add(a, b):\n    return 4\n",
    "import pytest\npytestmark = pytest.mark.skip\ndef add(a, b):\n    pytest.skip()\n",
    "import pytest\npytest.main = lambda _, plugins: setattr(plugins[0], 'has_passed', True)\nadd = min\n",
    "import _pytest.main as m\nm.Session.genitems = lambda *_: []\ndef add(a, b):\n    return 4\n",
    "import math\nmath.isclose = lambda *_: True\ndef add(a, b):\n    return 4\n",
    "raise SystemExit(0)",
)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "every cheat"])
@each_case("form", FORMS)
def test_only_right_programs_pass_the_tests_of_each_form(form: str, every: bool) -> None:
    value, right = FORMS[form]
    tests = read_tests(value)
    assert [passed_tests(code, tests) for code in right] == [len(tests)] * len(right)
    wrong = ("", "pass", "x = 1", WRONG, *CHEATS) if every or form == next(iter(FORMS)) else (WRONG,)
    assert [passed_tests(code, tests) for code in wrong] == [0] * len(wrong)


def test_options_of_pytest_in_the_environment_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-v --no-such-option")
    assert passed_tests(RIGHT, read_tests(FORMS["functions of pytest"][0])) == 1


@pytest.mark.parametrize(
    "forms", [IN_A_SANDBOX, pytest.param(tuple(FORMS), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_tests_of_each_form_are_run_in_a_sandbox(forms: tuple[str, ...]) -> None:
    rows = [(value, right[0]) for value, right in map(FORMS.__getitem__, forms)]
    rows.append((rows[0][0], WRONG))
    options = {OPTIONS: [{"name": "Code"}, 300.0, 1], "tests": [value for value, _ in rows]}
    found = score(["?"] * len(rows), [code for _, code in rows], [True] * len(rows), **options)
    assert found == [{"score": float(code != WRONG), "tests": float(code != WRONG)} for _, code in rows]


def test_a_program_reads_and_writes_a_long_text() -> None:
    tests = read_tests({"inputs": ["1\n" * 20_000], "outputs": ["2\n" * 20_000]})
    code = "import sys\nfor line in sys.stdin:\n    print(int(line) + 1)\nexit()"
    assert passed_tests(code, tests) == 1
    assert passed_tests("print(2)", tests) == 0


@each_case(("printed", "score"), [("0.3333334", 1), ("1/3", 0), ("0.34", 0), ("nan", 0), ("inf", 0)])
def test_numbers_may_be_printed_with_other_digits(printed: str, score: int) -> None:
    tests = read_tests({"inputs": ["1\n"], "outputs": ["0.33333333\n"]})
    assert passed_tests(f"print('{printed}')", tests) == score


def test_a_whole_number_has_to_be_exact() -> None:
    assert passed_tests("print(1000000006)", read_tests({"inputs": [""], "outputs": ["1000000007"]})) == 0


LACKING = "@fixture\ndef b(): ...\ndef test_add(a, b):\n    assert a"
UNREADABLE = {
    "": "holds no test",
    "eJwrSS0uUShJLS4BABcDBCY": "holds a test that checks nothing",
    "x ==": "holds a test that is no Python: invalid syntax",
    '{"a": 1}': "holds a mapping with a, expected inputs and as many outputs",
    '{"inputs": ["1"], "outputs": []}': "holds a mapping with inputs, outputs, expected inputs and as many outputs",
    '{"inputs": "23", "outputs": "24"}': "holds a mapping with inputs, outputs, expected inputs and as many outputs",
    LACKING: "holds a test function test_add with parameters, which nothing gives",
    f"@pytest.mark.skipif(a, reason='a b')\ndef test_one(): ...\n{LACKING}": (
        "holds a test function test_add with parameters, which nothing gives"
    ),
    "async def test_add():\n    assert add(2, 3) == 5": "holds an asynchronous test, which nothing runs",
}


@each_case("value", UNREADABLE)
def test_tests_that_cannot_be_read_are_named(value: str) -> None:
    with pytest.raises(ValueError, match=r"^holds ") as caught:
        read_tests(value)
    assert str(caught.value).startswith(UNREADABLE[value])


def job_with(folder: Path, verifier: Mapping[str, Any]) -> Job:
    return job(
        folder,
        "one",
        {
            "algorithm": {"name": "GRPO"},
            "models": {"actor": {"uri": "hf://a/b"}, "reward": {"verifier": dict(verifier)}},
            "data": {"train": {"uri": "hf://a/b"}},
            "rollout": {"samplesPerPrompt": 2},
            "training": {"totalSteps": 1, "promptBatchSize": 1},
        },
    )


ROWS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, list[Any]], Mapping[int, str]]] = {
    "tests that nothing has to pass": (
        {"name": "Code"},
        {"tests": ["assert add(2, 3) == 5", "import math\nmath.sqrt(2)", '{"inputs": [""], "outputs": [" "]}']},
        {1: "which an empty response fulfils", 2: "which an empty response fulfils"},
    ),
    "tests that cannot be read": ({"name": "Code"}, {"tests": ["x =="]}, {0: "which holds a test that is no Python"}),
    "a solution that fails": (
        {"name": "Code", "solutionKey": "solution"},
        {"tests": ["assert add(2, 3) == 5"] * 3, "solution": [RIGHT, WRONG, json.dumps([WRONG, RIGHT])]},
        {1: "which no right response fulfils for Code"},
    ),
    "answers that are no formulas": (
        {"name": "Math"},
        {"answer": ["72", "\\$36", "$18", "$$", ["?", "4"], "\\frac{1}{2}", "x^2+1"]},
        {3: "which no right response fulfils for Math"},
    ),
    "answers in words": (
        {"name": "Math"},
        {
            "answer": [
                "Paris",
                "No solution",
                "thirty-six",
                "March 3",
                "\\text{odd}",
                "xy",
                "\\sin x",
                "36 dollars",
                ["Ann", "7"],
            ]
        },
        dict.fromkeys(range(4), "which is in words, which ExactMatch and FuzzyMatch compare"),
    ),
    "answers with signs that nothing reads": (
        {"name": "Math"},
        {"answer": ["\u2605\u2605", "\u2605\u2605 36"]},
        {0: "which no right response fulfils for Math"},
    ),
    "answers without their mark": (
        {"name": "Math", "answerExtract": "#### (.+)"},
        {"answer": ["6 * 12\n#### 72", "72"]},
        {1: "which holds no match of answerExtract"},
    ),
    "words that do not count": (
        {"name": "FuzzyMatch"},
        {"answer": ["the", "Eiffel Tower"]},
        {0: "which an empty response fulfils"},
    ),
    "an answer that is a mapping": (
        {"name": "ExactMatch"},
        {"answer": [{"a": 1}, "pass"]},
        {0: "which the column answer holds"},
    ),
    "the answer to nothing": ({"name": "ExactMatch"}, {"answer": [" ", "a"]}, {0: "which an empty response fulfils"}),
}


@pytest.mark.parametrize("case", ROWS)
def test_bad_expectations_are_found_and_no_others(case: str, tmp_path: Path) -> None:
    verifier, table, expected = ROWS[case]
    one = job_with(tmp_path, verifier)
    (source,) = one.spec.data.train.sources("x").values()
    found = find_faults(one, source, table)
    assert found.keys() == expected.keys()
    assert all(f", {expected[row]}" in what for row, what in found.items())


def test_a_solution_is_read_once_and_is_in_no_batch(
    tmp_path: Path,
    chat: PreTrainedTokenizerFast,  # noqa: F811 a fixture
) -> None:
    rows = [{"prompt": "?", "tests": "assert add(2, 3) == 5", "solution": each} for each in (RIGHT, WRONG, RIGHT)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = job_with(tmp_path, {"name": "Code", "solutionKey": "solution"})
    spec = one.spec.with_sources(lambda each: each.model_copy(update={"uri": f"file://{tmp_path}/rows.jsonl"}))
    check = partial(find_faults, one.model_copy(update={"spec": spec}))
    loader = PromptLoader(spec.data.train, chat, path="x", spec=spec, check=check)
    assert list(loader.readers[0].numbers) == [0, 2]
    assert loader.columns(torch.arange(2)) == [{"tests": rows[0]["tests"]}] * 2


DECODER = """import json
class Same:
    __eq__ = lambda *_: True
json._default_decoder.decode = lambda *_: Same()
def add(a, b):
    return 0
"""
JUDGES_OF_ITS_OWN = {
    "a loader without tests": (
        "import unittest\nunittest.TestLoader.loadTestsFromTestCase = lambda *_: unittest.TestSuite()",
        "import unittest\nclass T(unittest.TestCase):\n    def test_one(self):\n        self.assertEqual(add(1, 2), 3)",
    ),
    "a decoder of its own": (
        DECODER,
        '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}',
    ),
}


@pytest.mark.parametrize("cheat", JUDGES_OF_ITS_OWN)
def test_a_program_does_not_change_how_it_is_judged(cheat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json._default_decoder, "decode", json._default_decoder.decode)  # type: ignore[attr-defined]
    code, tests = JUDGES_OF_ITS_OWN[cheat]
    assert passed_tests(code, read_tests(tests)) == 0
