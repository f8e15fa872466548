"""Each verifier against a table of answers that are right, nearly right, or made to be taken for right."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_api.spec.verifiers import RewardVerifier
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.rewards import verifiers
from rlhf_trainer.rewards.function import UserFunction
from rlhf_trainer.rewards.sample import SCORE, STOPPED, Sample, Score
from rlhf_trainer.rewards.supervision import ChildLimits, judge_in_children
from rlhf_trainer.rewards.verifiers import OPTIONS
from rlhf_trainer.workers.scoring import code_of
from tests.each import each_case

Table = Sequence[tuple[Any, str, float]]
"""(the right answer, a response, its score)."""

MATH: Table = [
    ("4", "It is 4.", 1),
    ("4", "So the answer is $\\boxed{4}$.", 1),
    ("4", "2 + 2 = 4, which is right, and not 5", 0),
    ("4", "\\boxed{5}, for 4 is wrong", 0),
    ("1/2", "$\\frac{1}{2}$", 1),
    ("1/2", "0.5", 1),
    ("1/2", "\\boxed{\\frac{2}{4}}", 1),
    ("\\frac{1}{2}", "1/2", 1),
    ("$\\sqrt{8}$", "$2\\sqrt{2}$", 1),
    ("1000", "1,000", 1),
    ("-3", "-3", 1),
    ("-3", "3", 0),
    ("12", "1", 0),
    ("1", "12", 0),
    ("0.333", "1/3", 0),
    (7, "seven is 7", 1),
    (["4", "5"], "5", 1),
    ("4", "", 0),
    ("4", "four", 0),
    ("4", "\\boxed{}", 0),
    ("4", "\\boxed{4", 0),
    ("x^2+2x+1", "$(x+1)^2$", 1),
    ("4", "((((" * 500, 0),
    ("4", "nan", 0),
    ("4", "$\\infty$", 0),
    ("4", "True", 0),
]
EXACT: Table = [
    ("Paris", "Paris", 1),
    ("Paris", " Paris\n", 1),
    ("Paris", "paris", 0),
    ("Paris", "Paris.", 0),
    ("Paris", "Paris or London", 0),
    ("Paris", "", 0),
    ("Paris", "P\u0430ris", 0),
    (12, "12", 1),
    (["Paris", "Lutetia"], "Lutetia", 1),
    ("a\nb", "a\nb", 1),
    ("Paris", "Paris\0", 0),
]
FUZZY: Table = [
    ("The Eiffel Tower", "eiffel tower!", 1),
    ("Eiffel Tower", "Eiffel", 2 / 3),
    ("Eiffel Tower", "tower tower tower tower", 1 / 3),
    ("Eiffel Tower", "Eiffel Tower " * 50, 2 * 2 / 102),
    ("Eiffel Tower", "", 0),
    ("Eiffel Tower", "the a an", 0),
    ("Eiffel Tower", "Notre-Dame", 0),
    (["Eiffel Tower", "La dame de fer"], "la dame de fer", 1),
]
MARK = "#### (.+)"
EXTRACTED: Table = [
    ("... so #### 72", "6 * 12 = 72\n#### 72", 1),
    ("#### 72", "6 * 12 = 72\n#### 72", 1),
    ("#### 72", "#### 71\n#### 72", 1),
    ("#### 72", "#### 72\n#### 71", 0),
    ("#### 72", "72", 0),
    ("#### 72", "####72", 0),
]
MARKED: Table = [
    ("... so #### 72", "6 * 12 = 72", 1),
    ("#### 71\n#### 72", "It is 71.", 0),
    ("... so #### 72", "#### 72", 1),
]
THOUGHTS: Table = [
    ("72", "<think>a</think><answer>72</answer>", 1),
    ("72", "<think>so it is 72.</think><answer>5</answer>", 0),
    ("72", "<think>so it is 72.</think>", 0),
    ("72", "<think>so it is 72.", 0),
    ("72", "<think>5</think>72", 1),
    ("72", "<think>5</think>\n\n\\boxed{72}", 1),
    ("72", "<think>\\boxed{72}</think>\n\n\\boxed{5}", 0),
    ("72", "<think>\\boxed{72}</think>\n\nIt is 5.", 0),
    ("72", "it may be 5</think>72", 1),
    ("72", "it may be 72</think>5", 0),
    ("72", "it is 72</think>", 0),
    ("72", "a</think>b</think>72", 1),
    ("72", "<think>72</think><think>5</think>", 0),
    ("72", "<think>5</think><think>6</think>The answer is 72.", 1),
    ("72", "<think>5</think>72<think>6", 1),
    ("72", "<think>5</think>6<think>72", 0),
    ("72", "<think>a<answer>72</answer></think><answer>5</answer>", 0),
    ("72", "<think>a<answer>72</answer>", 0),
    ("72", "<THINK>72</THINK> 5", 0),
    ("72", "<thinking>72</thinking> 5", 0),
    ("72", "<reasoning>5</reasoning>\n<answer>\n72\n</answer>", 1),
    ("72", "<thought>72</thought><answer></answer>", 0),
    ("72", "<answer>72</answer>", 1),
    ("72", "<answer>5</answer> or 72", 0),
    ("72", "72 <answer>5</answer>", 0),
    ("72", "<answer>72</answer><answer>5</answer>", 0),
    ("72", "<answer>5</answer><answer>72</answer>", 1),
    ("72", "<answer>It is \\boxed{72}, not 5.</answer>", 1),
    ("72", "<answer>It is \\boxed{5}, not 72.</answer>", 0),
    ("72", "<answer>72", 0),
    ("72", "Answer: 72", 1),
    ("72", "The answer is 5.\nI did not say 72.", 0),
    ("72", "5\n72", 1),
    ("72", "72\n5", 0),
    ("72", "\\boxed{5}\n\\boxed{72}", 1),
    ("72", "\\boxed{72}\n\\boxed{5}", 0),
    ("72", "\\boxed{72}\nas 5 is wrong", 1),
    ("72", "**Answer:** 72", 1),
    ("72", "I think it is 72", 1),
    ("72", "", 0),
]
CURRENCY: Table = [
    ("\\$36", "\\boxed{36}", 1),
    ("\\$36", "\\boxed{\\$36}", 1),
    ("\\$32,\\!348", "\\boxed{32,348}", 1),
    ("\\$32{,}348", "\\boxed{32348}", 1),
    ("\\$18.90", "\\boxed{18.90}", 1),
    ("$18", "\\boxed{18}", 1),
    ("$18", "It costs $18.", 1),
    ("\\$36", "\\$36", 1),
    ("36", "It costs \\$36.", 1),
    ("36", "$\\$36$", 1),
    ("\\$36", "\\boxed{63}", 0),
]
JSON: Table = [
    (None, '{"age": 3}', 1),
    (None, 'Here it is:\n```json\n{"age": 3}\n```\nDone.', 1),
    (None, '```json\n{"age": 3}\n```\n```json\n{"age": "x"}\n```', 0),
    (None, '```json\n{"age": 3}\n```\n```bash\ncat it.json\n```', 1),
    (None, '{"age": "3"}', 0),
    (None, '{"age": -1}', 0),
    (None, '{"age": 3, "more": 1}', 0),
    (None, "{'age': 3}", 0),
    (None, '{"age": NaN}', 0),
    (None, '{"age": 3} and more', 0),
    (None, "[" * 100_000, 0),
    (None, "", 0),
    (None, "3", 0),
]
REGEX: Table = [
    (None, "aaab", 1),
    (None, "b", 0),
    (None, "", 0),
]
ENDLESS_FORMULA: Table = [("4", "$9^{9^{9^{9^{9}}}}$", 0), ("4", "4", 1)]
ENDLESS_SEARCH: Table = [(None, "a" * 64 + "!", 0), (None, "ab", 1)]
FORMAT: Table = [
    (None, "<think>2 and 2</think>\n<answer>4</answer>", 1),
    (None, "<think></think><answer></answer>", 1),
    (None, "<answer>4</answer><think>2</think>", 0),
    (None, "<think>2</think><answer>4</answer> and more", 0),
    (None, "So: <think>2</think><answer>4</answer>", 0),
    (None, "<think>2<answer>4</answer>", 0),
    (None, "<think>2</think><answer>4</answer><answer>5</answer>", 0),
    (None, "<think>2<think>3</think></think><answer>4</answer>", 0),
    (None, "<think>2</think><answer>4", 0),
    (None, "<Think>2</Think><answer>4</answer>", 0),
    (None, "", 0),
]
LENGTH: Table = [
    (None, "12345", 1),
    (None, "  123  ", 1),
    (None, "12", 0),
    (None, "123456", 0),
    (None, " " * 5, 0),
    (None, "\u00e9" * 5, 1),
]
TABLES: Mapping[str, tuple[str, dict[str, Any], Table]] = {
    "Math": ("Math", {}, MATH),
    "ExactMatch": ("ExactMatch", {}, EXACT),
    "FuzzyMatch": ("FuzzyMatch", {}, FUZZY),
    "Math after a mark": ("Math", {"answerExtract": MARK, "responseExtract": MARK}, EXTRACTED),
    "ExactMatch after a mark": ("ExactMatch", {"answerExtract": MARK, "responseExtract": MARK}, EXTRACTED),
    "Math with a mark in the answer alone": ("Math", {"answerExtract": MARK}, MARKED),
    "Math after thoughts": ("Math", {}, THOUGHTS),
    "Math of prices": ("Math", {}, CURRENCY),
    "JSONSchema": (
        "JSONSchema",
        {
            "jsonSchema": {
                "type": "object",
                "properties": {"age": {"type": "integer", "minimum": 0}},
                "required": ["age"],
                "additionalProperties": False,
            }
        },
        JSON,
    ),
    "Regex": ("Regex", {"pattern": r"^(a+)+b$"}, REGEX),
    "Regex that never ends": ("Regex", {"pattern": r"^(a+)+b$"}, ENDLESS_SEARCH),
    "Math that never ends": ("Math", {}, ENDLESS_FORMULA),
    "Format": ("Format", {"tags": ["think", "answer"]}, FORMAT),
    "Length": ("Length", {"minimum": 3, "maximum": 5}, LENGTH),
}
TESTS = ["assert double(2) == 4", "assert double(-1) == -2 and all(double(n) == 2 * n for n in range(5))"]
RIGHT = "def double(n):\n    return 2 * n\n"
CODE: Mapping[str, tuple[str, float]] = {
    "right": (RIGHT, 1),
    "right in a block": (f"Sure:\n```python\n{RIGHT}```\nIt doubles.", 1),
    "right in the second block": (f"```python\ndouble = None\n```\nno, rather:\n```python\n{RIGHT}```", 1),
    "right, with libraries of its own": (f"import collections, math, itertools\n{RIGHT}", 1),
    "right, with threads": (
        f"import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()\n{RIGHT}",
        1,
    ),
    "right, then a command to run it": (f"```python\n{RIGHT}```\nRun it:\n```bash\npython it.py\n```", 1),
    "right, in a block with a title": (f"```py title=it.py\n{RIGHT}```\n```text\n4\n```", 1),
    "wrong in the last block of Python": (f"```\n{RIGHT}```\n```python\ndouble = None\n```", 0),
    "half right": ("def double(n):\n    return 4 if n == 2 else 0", 0.5),
    "wrong": ("def double(n):\n    return n", 0),
    "no code": ("I would double it.", 0),
    "nothing": ("", 0),
    "it leaves at once": ("import os\nos._exit(0)", 0),
    "it leaves by an exception": ("raise SystemExit(0)", 0),
    "it leaves when it is called": ("def double(n):\n    raise SystemExit(0)", 0),
    "it says that it has passed": ("print('passed', 2, 2.0)\ndouble = print", 0),
    "it replaces what the tests call": ("all = lambda _: True\ndef double(n):\n    return 4 if n == 2 else -2", 0.5),
    "it replaces built-in functions": (
        "import builtins\nbuiltins.all = lambda _: True\ndef double(n):\n    return 4 if n == 2 else -2",
        0.5,
    ),
    "it replaces what runs the tests": (
        """
import builtins, rlhf_trainer.rewards.verifiers as v
builtins.exec = lambda *_: None
for name in [name for name in vars(v) if callable(vars(v)[name])]:
    setattr(v, name, lambda *_: 1.0)
""",
        0,
    ),
    "it answers in its place": (
        """
import os, struct
for file in range(1, 64):
    try:
        os.write(file, 8 * struct.pack('d', 2.0))
    except OSError:
        pass
os._exit(0)
""",
        0,
    ),
    "it takes for ever": ("while True:\n    pass", 0),
    "it sleeps": ("import time\ntime.sleep(1000)", 0),
    "it takes all memory": (f"double = [bytearray(10**8) for _ in range(100)]\n{RIGHT}", 0),
    "it reads what nobody types": (f"input()\n{RIGHT}", 0),
    "it has no end": ("def double(n):\n    return double(n)", 0),
    "it forks": (f"import os\nwhile True:\n    os.fork()\n{RIGHT}", 0),
    "it starts a program": (f"import subprocess\nsubprocess.run(['true'])\n{RIGHT}", 0),
    "it becomes a program": ("import os\nos.execv('/bin/true', ['true'])", 0),
    "it opens a connection": (f"import socket\nsocket.socket()\n{RIGHT}", 0),
    "it ends the verifier": (f"import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n{RIGHT}", 0),
    "it writes a file": (f"open('FOLDER/new', 'w').write('x')\n{RIGHT}", 0),
    "it adds to a file": (f"open('FOLDER/mine', 'a').write('x')\n{RIGHT}", 0),
    "it makes a folder": (f"import os\nos.mkdir('FOLDER/new')\n{RIGHT}", 0),
    "it deletes a file": (f"import os\nos.remove('FOLDER/mine')\n{RIGHT}", 0),
    "it renames a file": (f"import os\nos.rename('FOLDER/mine', 'FOLDER/new')\n{RIGHT}", 0),
    "it lets others read a file": (f"import os\nos.chmod('FOLDER/mine', 0o777)\n{RIGHT}", 0),
    "it takes its limits away": (
        f"import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n{RIGHT}",
        0,
    ),
}


def scores(
    name: str,
    options: Mapping[str, Any],
    columns: Mapping[str, Sequence[Any]],
    responses: Sequence[str],
    *,
    finished: bool = True,
) -> list[Score]:
    """The scores as a job's worker gets them, from a process behind its guard."""
    reward = RewardVerifier.model_validate({"verifier": {"name": name, **options}})
    code = code_of(reward, ranks=1, deadline=600.0, path="job: spec.models.reward")
    assert isinstance(code, UserFunction)
    try:
        return code.scores(
            [
                Sample(
                    step=1,
                    row=row,
                    prompt="?",
                    response=response,
                    finished=finished,
                    columns={column: values[row] for column, values in columns.items()},
                )
                for row, response in enumerate(responses)
            ]
        )
    finally:
        code.close()


ENDLESS = ("Regex that never ends", "Math that never ends")
"""Tables with a response that takes the time limit, 5 s."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in ENDLESS else []) for case in TABLES]
)
def test_every_answer_of_its_table_gets_its_score(case: str) -> None:
    name, options, table = TABLES[case]
    found = scores(name, options, {"answer": [row[0] for row in table]}, [row[1] for row in table])
    judged = {
        (row, response[:80]): score.value
        for row, ((_, response, _), score) in enumerate(zip(table, found, strict=True))
    }
    assert judged == pytest.approx({(row, response[:80]): value for row, (_, response, value) in enumerate(table)})


@pytest.mark.parametrize("case", ENDLESS)
def test_a_judgement_that_never_ends_is_stopped(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "JUDGEMENT_SECONDS", 0.5)
    name, options, table = TABLES[case]
    verifier = RewardVerifier.model_validate({"verifier": {"name": name, **options}}).verifier
    given: Any = {OPTIONS: [verifier.model_dump(mode="json"), 600.0, 1], "answer": [row[0] for row in table]}
    responses = [row[1] for row in table]
    found = verifiers.score(["?"] * len(table), responses, [True] * len(table), **given)
    assert found == [{SCORE: 0.0, STOPPED: 1.0}, 1.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("code")
    (made / "mine").write_text("mine")
    yield made
    assert [file.name for file in made.iterdir()] == ["mine"]
    assert (made / "mine").read_text() == "mine"
    assert (made / "mine").stat().st_mode & 0o777 != 0o777


@pytest.fixture(scope="module")
def passed(folder: Path) -> dict[str, float | None]:
    """The share of the tests that each response passes."""
    responses = [code.replace("FOLDER", str(folder)) for code, _ in CODE.values()]
    options = {"seconds": 0.5, "memoryMebibytes": 256}
    others = psutil.Process().children(recursive=True)
    found = scores("Code", options, {"tests": [TESTS] * len(CODE)}, responses)
    assert [process for process in psutil.Process().children(recursive=True) if process not in others] == []
    assert all(score.value == (score.parts["tests"] == 1.0) for score in found if "tests" in score.parts)
    assert STOPPED in found[list(CODE).index("it takes for ever")].parts
    return {name: score.parts.get("tests", score.value) for name, score in zip(CODE, found, strict=True)}


@each_case("name", CODE)
def test_code_passes_the_tests_that_it_should(name: str, passed: dict[str, float | None]) -> None:
    assert passed[name] == CODE[name][1]


def test_a_response_that_was_cut_off_is_wrong() -> None:
    (found,) = scores("ExactMatch", {}, {"answer": ["4"]}, ["4"], finished=False)
    assert found == Score(0.0)


@pytest.mark.parametrize(("answer", "told"), [(None, "null"), ([], r"\[\]"), ({"a": 1}, r'\{"a": 1\}')])
def test_a_row_without_an_answer_is_told(answer: Any, told: str) -> None:
    sentence = (
        rf": the verifier ExactMatch raised ValueError: the column answer holds {told}, expected .*; the sample is "
    )
    with pytest.raises(UserCodeError, match=sentence):
        scores("ExactMatch", {}, {"answer": ["4", answer]}, ["4", "4"])


@each_case("column", ["prompts", "responses", "finished", "verifier", "seconds", "given"])
def test_the_column_of_the_answers_has_any_name(column: str) -> None:
    (found,) = scores("ExactMatch", {"answer_key": column}, {column: ["a"]}, ["a"])
    assert found.value == 1.0


def test_a_response_has_no_more_time_than_its_call() -> None:
    limits = ChildLimits(seconds=30, memory=2**30)

    def slow(_: int) -> float:
        time.sleep(60)
        return 1.0

    assert judge_in_children(slow, [0, 1], limits, until=time.monotonic() + 0.2) == [None, None]


def test_only_seconds_of_the_cpu_count() -> None:
    """As on a machine where other processes are in turn; who computes for ever is stopped and marked."""
    limits = ChildLimits(seconds=0.5, memory=2**30)

    def judge(item: int) -> float:
        time.sleep(0.6)
        while item:
            pass
        return 1.0

    found = judge_in_children(judge, [0, 1, 0], limits, until=time.monotonic() + 600)
    assert found == pytest.approx([1.0, math.nan, 1.0], nan_ok=True)


def test_a_schema_that_is_none_is_told() -> None:
    with pytest.raises(UserCodeError, match="raised SchemaError: "):
        scores("JSONSchema", {"jsonSchema": {"type": "nothing"}}, {}, ["{}"])
