"""A user's function runs in a process of its own: it may crash, hang or lie, and the sentence names the sample."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.rewards import supervision
from rlhf_trainer.rewards.function import UserFunction
from rlhf_trainer.rewards.sample import Sample, Score
from tests.each import each_case
from tests.trainer.rewards import user_functions
from tests.trainer.rewards.user_functions import BAD

HERE, PATH = "tests.trainer.rewards.user_functions", user_functions.__file__
FILE = rf" \({PATH}:\d+\)"
"""Where a function begins, or fails."""
OFFENDER = 'the sample is row 12 of step 3, prompt "q2", response "bad"'
SECONDS, PATIENT = 1.0, 60.0
"""Time limits of the functions that never return, and of all others."""


def samples(*responses: str) -> list[Sample]:
    return [
        Sample(step=3, row=row, prompt=f"q{row - 10}", response=response, finished=True)
        for row, response in enumerate(responses, start=10)
    ]


GOOD, WITH_ONE_BAD = samples("a", "b", "c"), samples("a", "b", BAD, "c")


@contextmanager
def function(
    name: str, *, seconds: float = PATIENT, deadline: float = 1000.0, **arguments: Any
) -> Iterator[UserFunction]:
    """The function, whose processes must be gone at the end."""
    path = "job: spec.models.reward"
    made = UserFunction(f"{HERE}:{name}", arguments=arguments, seconds=seconds, deadline=deadline, path=path)
    others = psutil.Process().children()  # such as the server of a fixture
    try:
        yield made
    finally:
        made.close()
    assert not started_since(others), "a process is left, or a zombie"


def started_since(others: list[psutil.Process]) -> list[psutil.Process]:
    """The children of these tests that are not among the others, and theirs; the others may start what they like."""
    children = [process for process in psutil.Process().children() if process not in others]
    return [process for child in children for process in (child, *child.children(recursive=True))]


def numbers(made: UserFunction, given: list[Sample]) -> list[float | None]:
    """The scores without their parts."""
    return [score.value for score in made.scores(given)]


def sentence(name: str, given: list[Sample]) -> str:
    with function(name, seconds=SECONDS if name in ("never_returns", "sleeps") else PATIENT) as made:
        made.ready()
        with pytest.raises(UserCodeError) as raised:
            made.scores(given)
    text = str(raised.value)
    assert text.startswith(f"job: spec.models.reward: {HERE}:{name} ")
    assert "\n" not in text
    return text.removeprefix(f"job: spec.models.reward: {HERE}:{name} ")


def test_each_sample_gets_a_number_arguments_are_passed() -> None:
    with function("lengths", scale=2.0) as made:
        made.ready()
        assert numbers(made, samples("a", "bcd")) == [2.0 * (2 + 1 + 1), 2.0 * (2 + 3 + 1)]
        assert made.scores([]) == []


def test_a_function_may_be_awaited() -> None:
    with function("lengths_later") as made:
        assert numbers(made, samples("a", "bcd")) == [2 + 1 + 1, 2 + 3 + 1]


def test_a_score_may_be_any_number_or_none_or_parts() -> None:
    with function("all_kinds_of_scores") as made:
        assert made.scores(samples(*"abcdefghi")) == [
            Score(1.0),
            Score(0.5),
            Score(2.5),
            Score(1.5),
            Score(3.0),
            Score(None),
            Score(1.25, {"right": 1.0, "brief": 0.25, "rare": None}),
            Score(2.0, {"right": 7.0}),
            Score(None, {"rare": None}),
        ]


@pytest.mark.parametrize("name", [pytest.param("a_tensor", marks=pytest.mark.slow), "an_array", "a_column_of_numbers"])
def test_numbers_of_any_library_are_numbers(name: str) -> None:
    with function(name) as made:
        assert numbers(made, GOOD) == [0.0, 0.5, 1.0]


def test_too_many_parts_are_told() -> None:
    assert re.match(f"returned more than 16 different parts{FILE}; ", sentence("many_parts", GOOD))


def test_a_function_gets_the_columns_that_it_asks_for() -> None:
    given = [replace(each, columns={"answer": "b", "level": 3}) for each in GOOD]
    for name, expected in {"right": [0.0, 2.0, 0.0], "names_of_columns": [3.0] * 3, "lengths": [4.0] * 3}.items():
        arguments = {"lengths": {}, "right": {"more": 2.0}}.get(name, {"more": [0, 0, 0]})
        with function(name, **arguments) as made:
            assert numbers(made, given) == expected


def test_a_column_that_is_not_there_is_told() -> None:
    told = sentence("right", GOOD)
    assert re.match(f"needs answer, which is no column that the data names and no argument{FILE}; ", told), told


@each_case(
    ("name", "told"),
    {
        "raises": rf"raised ZeroDivisionError: nothing to divide by at all{FILE}",
        "raises_in_a_library": rf"raised JSONDecodeError: .*{FILE}",
        "exits": r"raised SystemExit: enough \(.*\)",
        "leaves": r"ended its process with exit code 3",
        "is_killed": r"was ended by signal 9 \(SIGKILL\)",
        "kills_its_guard": r"was ended by signal 9 \(SIGKILL\)",
        "kills_its_group": r"was ended by signal 9 \(SIGKILL\)",
        "crashes": r"was ended by signal 11 \(SIGSEGV\)",
        "never_returns": r"did not return within 1 s",
        "sleeps": r"did not return within 1 s",
        # 120: Python could not write what it had kept
        "closes_everything": r"ended its process with exit code (1|120)",
        "is_ended_in_real_time": r"was ended by signal 35",
        "raises_half_a_character": r"raised ValueError: half a pair: \\ud800 \(.*\)",
        "nan": rf"returned nan, expected a finite number \(float32\){FILE}",
        "beyond_float32": rf"returned 1e\+300, expected a finite number \(float32\){FILE}",
        "huge_number": rf"returned a value of type int, expected a number{FILE}",
        "text": rf"returned a value of type str, expected a number{FILE}",
        "part_that_is_text": rf"returned a value of type str, expected a number{FILE}",
        "part_without_a_name": rf"returned a part named '3', expected letters, digits and '_'{FILE}",
        "several_numbers": rf"returned a value of type ndarray, expected a number{FILE}",
    }.items(),
)
def test_what_it_does_at_one_sample_is_told_with_the_sample(name: str, told: str) -> None:
    assert re.fullmatch(f"{told}; {re.escape(OFFENDER)}", text := sentence(name, WITH_ONE_BAD)), text


@each_case(
    ("name", "told"),
    {
        "one_number": f"returned a value of type float, expected a list with a number for each response{FILE}; ",
        "a_set": f"returned a value of type set, expected a list with a number for each response{FILE}; ",
        "one_for_all": f"returned 1 values for 3 responses{FILE}; no sample does it by itself, the first of the 3 is ",
        "without_end": f"returned more than 1 values for 1 responses{FILE}; the sample is row 10 of step 3, ",
    }.items(),
)
def test_a_wrong_answer_to_all_of_them_is_told(name: str, told: str) -> None:
    assert re.match(told, text := sentence(name, GOOD)), text


@pytest.mark.parametrize(
    ("entrypoint", "told"),
    {
        "no.such.module:score": "cannot be imported: ModuleNotFoundError: No module named 'no'",
        f"{HERE}:missing": f"cannot be imported: AttributeError: module '{HERE}' has no attribute 'missing' ({PATH})",
        f"{HERE}:not_a_function": f"cannot be imported: TypeError: it is a value of type int, not a function ({PATH})",
    }.items(),
)
def test_a_missing_function_is_told_before_the_first_call(entrypoint: str, told: str) -> None:
    made = UserFunction(entrypoint, arguments={}, seconds=SECONDS, deadline=PATIENT, path="spec.evaluation.functions")
    with pytest.raises(UserCodeError) as raised:
        made.ready()
    made.close()
    assert str(raised.value) == f"spec.evaluation.functions: {entrypoint} {told}"


def test_a_function_that_shuts_its_connection_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "GUARD_SECONDS", 0.5)
    assert sentence("shuts_its_sockets", WITH_ONE_BAD) == f"closed its connection to the trainer; {OFFENDER}"


def test_a_function_in_two_processes_answers_each_call_once() -> None:
    with function("comes_back_twice") as made:
        for length in (1, 2, 3):
            assert numbers(made, samples("x" * length)) == [float(length)]
            time.sleep(0.3)  # the other process comes back now


def test_the_search_ends_before_the_call_counts_as_hung() -> None:
    with function("sleeps", seconds=1.0, deadline=1.5) as made, pytest.raises(UserCodeError) as raised:
        made.scores(WITH_ONE_BAD)
    told = "did not return within 1 s; there was no time to find the sample, the first of the 4 is row 10 of step 3"
    assert told in str(raised.value)


def test_half_a_surrogate_pair_in_a_sample_can_be_shown() -> None:
    shown = str(Sample(step=1, row=0, prompt="\ud800", response="ü", finished=True))
    assert shown.encode().decode() == 'row 0 of step 1, prompt "\\ud800", response "ü"'


def test_a_module_is_imported_once_for_all_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTE_IMPORTS", str(tmp_path / "note"))
    with function("lengths") as made:
        made.ready()
        for _ in range(3):
            made.scores(GOOD)
    assert (tmp_path / "note").read_text() == "imported\n"


def test_a_long_import_is_no_part_of_a_call_or_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMPORT_TAKES", "1")
    with function("is_killed", seconds=0.5) as made, pytest.raises(UserCodeError) as raised:
        made.scores(WITH_ONE_BAD)
    assert str(raised.value).endswith(f"was ended by signal 9 (SIGKILL); {OFFENDER}")


def test_what_it_prints_disturbs_nothing() -> None:
    with function("shouts") as made:
        assert numbers(made, WITH_ONE_BAD) == [1.0, 1.0, 5.0, 1.0]


def test_processes_that_it_leaves_end_with_it() -> None:
    others = psutil.Process().children()
    with function("leaves_processes") as made:
        assert numbers(made, WITH_ONE_BAD) == [1.0, 1.0, 2.0, 1.0]
        family = started_since(others)
        assert len(family) >= 5  # the guard, the function, and three that it has left
        made.close()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive


def test_a_trainer_that_is_killed_takes_the_function_with_it() -> None:
    code = f"""
import sys
from rlhf_trainer.rewards.function import UserFunction
made = UserFunction("{HERE}:never_returns", arguments={{}}, seconds=1000.0, deadline=2000.0, path="")
made.ready()
print("ready", flush=True)
from rlhf_trainer.rewards.sample import Sample
made.scores([Sample(step=1, row=0, prompt="", response="bad", finished=True)])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with psutil.Popen([sys.executable, "-c", code], env=environment, stdout=-1) as trainer:
        assert trainer.stdout.readline() == b"ready\n"
        family = trainer.children(recursive=True)
        assert len(family) == 2
        trainer.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
