"""Each episode of an environment has a process of its own: what one does is a sentence, and the others go on."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_trainer.environments.environments import Environments
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.rewards.supervision import AnswerFailure
from tests.trainer.environments import user_environments
from tests.trainer.rewards.test_whatever_a_function_does_is_one_sentence import started_since

HERE = "tests.trainer.environments.user_environments"
SHORT, PATIENT = 1.5, 60.0
"""Time limits of what never answers, and of all others."""


@contextmanager
def environments(name: str, *, seconds: float = PATIENT, **arguments: Any) -> Iterator[Environments]:
    """Those of a class, whose processes must be gone at the end."""
    others = psutil.Process().children()
    made = Environments([f"{HERE}:{name}"], arguments=arguments, seconds=seconds, path="job: spec.rollout.environment")
    try:
        made.ready()
        yield made
    finally:
        made.close()
    assert not started_since(others), "a process is left, or a zombie"


def asked(made: Environments, calls: Mapping[int, tuple[str, Any]]) -> dict[int, Any]:
    """What episodes answer to a call each."""
    for number, (method, given) in calls.items():
        made.ask(number, method, given)
    found: dict[int, Any] = {}
    while len(found) < len(calls):
        found |= dict(made.answers(seconds=math.inf))
    return found


def outcomes(*behaviours: str, seconds: float = PATIENT) -> list[Any]:
    """What the first step of an episode of each behaviour comes to."""
    with environments("Unruly", seconds=seconds) as made:
        for number in range(len(behaviours)):
            made.begin(number, seed=number)
        asked(made, {number: ("reset", {"does": each}) for number, each in enumerate(behaviours)})
        found = asked(made, dict.fromkeys(range(len(behaviours)), ("step", "go")))
        for number in range(len(behaviours)):
            made.end(number)
    return [found[number] for number in range(len(behaviours))]


@pytest.mark.parametrize("name", ["Counting", "Asynchronous"])
def test_an_episode_is_an_object_of_its_own(name: str) -> None:
    with environments(name, turns=2) as made:
        for number in (4, 7):
            made.begin(number, seed=number)
        assert asked(made, {4: ("reset", {}), 7: ("reset", {"begin": "Go."})}) == {4: None, 7: "Go."}
        assert asked(made, {4: ("step", "a")}) == {4: [" 1:a ", 1.0, False]}
        assert asked(made, {4: ("step", "b"), 7: ("step", "c")}) == {4: [None, 2.0, True], 7: [" 1:c ", 1.0, False]}


def test_the_module_is_imported_once() -> None:
    with environments("Where") as made:
        for number in range(3):
            made.begin(number, seed=number)
        found = asked(made, {number: ("reset", {}) for number in range(3)})
    importers, own = zip(*(each.split() for each in found.values()), strict=True)
    assert (len(set(importers)), len(set(own))) == (1, 3)


def test_a_failure_is_a_sentence_and_the_others_go_on() -> None:
    behaviours = ("raise", "mutter", "exit", "die", "crash", "lie", "mumble", "nothing", "objects", "well")
    *failures, well = outcomes(*behaviours)
    assert well == [None, 1.0, True]
    place = "(/.*/user_environments.py:[0-9]+)"
    expected = [
        rf"step raised ZeroDivisionError: division by zero \({place}\)",
        rf"step raised UnspeakableError \({place}\)",
        rf"step raised SystemExit: bye \({place}\)",
        "ended its process with exit code 3",
        r"was ended by signal 11 \(SIGSEGV\)",
        rf"step gave as reward nan, expected a finite number .* \({place}\)",
        rf"step gave a value of type int, expected \(observation, reward, done\) \({place}\)",
        rf"step gave no observation, but the episode is not done \({place}\)",
        rf"step gave a value of type list, expected a text, or messages of role and content, both texts \({place}\)",
    ]
    for failure, sentence in zip(failures, expected, strict=True):
        assert isinstance(failure, AnswerFailure)
        assert re.fullmatch(sentence, failure.what), failure.what


def test_what_takes_too_long_ends_and_what_it_has_started_too() -> None:
    hang, leave, well = outcomes("hang", "leave", "well", seconds=SHORT)
    assert well == [None, 1.0, True]
    assert hang == leave == AnswerFailure("did not answer within 1.5 s", kind="late")


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("Failing", {}, r"__init__ raised OSError: the game is not there"),
        ("Counting", {"turn": 2}, r"__init__ raised TypeError: .* got an unexpected keyword argument 'turn'"),
        ("Deaf", {}, r"reset raised TypeError: Deaf.reset\(\) takes 1 positional argument but 2 were given"),
    ],
)
def test_what_fails_in_the_first_call_is_told_with_its_line(name: str, arguments: dict[str, Any], said: str) -> None:
    with environments(name, **arguments) as made:
        made.begin(0, seed=0)
        (failure,) = asked(made, {0: ("reset", {})}).values()
    (line,) = re.fullmatch(rf"{said} \(/\S+/user_environments\.py:(\d+)\)", failure.what).groups()  # type: ignore[union-attr]
    text = Path(user_environments.__file__).read_text().splitlines()[int(line) - 1]
    assert {"Failing": "raise OSError", "Counting": "class Counting", "Deaf": "def reset"}[name] in text


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Missing", f"{HERE}:Missing cannot be imported: AttributeError: .*"),
        ("NO_FUNCTION", f"{HERE}:NO_FUNCTION cannot be imported: TypeError: it is a value of type int, not a function"),
    ],
)
def test_what_cannot_be_imported_ends_the_run(name: str, sentence: str) -> None:
    with pytest.raises(UserCodeError, match=f"job: spec.rollout.environment: {sentence}"), environments(name):
        pass


def test_another_process_is_started_for_one_that_has_died() -> None:
    with environments("Where") as made:
        made.begin(0, seed=0)
        (before,) = asked(made, {0: ("reset", {})}).values()
        importer, own = (psutil.Process(int(each)) for each in before.split())
        importer.kill()
        psutil.wait_procs([own], timeout=PATIENT)
        assert isinstance(asked(made, {0: ("step", "go")})[0], AnswerFailure)
        made.begin(1, seed=1)
        (after,) = asked(made, {1: ("reset", {})}).values()
        assert after.split()[0] != before.split()[0]


def test_what_dies_after_its_answer_fails_when_it_is_asked_again() -> None:
    """Not before: the model is writing then, and its answer would find no episode."""
    with environments("Where") as made:
        made.begin(0, seed=0)
        (before,) = asked(made, {0: ("reset", {})}).values()
        own = psutil.Process(int(before.split()[1]))
        own.kill()
        psutil.wait_procs([own], timeout=PATIENT)
        assert made.answers(seconds=math.inf) == []
        assert asked(made, {0: ("step", "go")}) == {0: AnswerFailure("was ended by signal 9 (SIGKILL)", kind="ended")}


def test_episodes_fail_where_no_process_can_be_started(tmp_path: Path) -> None:
    module = tmp_path / "once.py"
    module.write_text(inspect.getsource(user_environments))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        others = set(psutil.Process().children())
        made = Environments(["once:Unruly"], arguments={}, seconds=PATIENT, path="job: spec.rollout.environment")
        made.ready()
        made.begin(0, seed=0)
        asked(made, {0: ("reset", {"does": "hang"})})
        made.ask(0, "step", "go")
        module.write_text("nonsense")
        (guard,) = set(psutil.Process().children()) - others
        found = guard.children(recursive=True)
        guard.kill()
        psutil.wait_procs(found, timeout=PATIENT)
        for number in (1, 2):
            made.begin(number, seed=number)
            made.ask(number, "reset", {})
        failures: dict[int, Any] = {}
        while len(failures) < 3:
            failures |= dict(made.answers(seconds=math.inf))
        made.close()
    assert all(isinstance(each, AnswerFailure) for each in failures.values())
    assert "NameError" in failures[2].what, failures


@pytest.mark.parametrize("which", [0, 1], ids=["that forked it", "and the guard"])
def test_no_episode_outlives_the_processes_before_it(which: int) -> None:
    """Not one that never answers either."""
    with environments("Unruly") as made:
        made.begin(0, seed=0)
        asked(made, {0: ("reset", {"does": "hang"})})
        made.ask(0, "step", "go")
        guard = max(psutil.Process().children(), key=psutil.Process.create_time)
        found = guard.children(recursive=True)
        assert len(found) == 3, "the one that forks, the episode's guard, and the episode"
        (guard if which else guard.children()[0]).kill()
        _, alive = psutil.wait_procs(found, timeout=PATIENT)
        assert not alive
        ((_, failure),) = made.answers(seconds=math.inf)
        assert isinstance(failure, AnswerFailure)


def test_what_an_episode_leaves_ends_with_it() -> None:
    with environments("Unruly") as made:
        guard = max(psutil.Process().children(), key=psutil.Process.create_time)
        made.begin(0, seed=0)
        asked(made, {0: ("reset", {"does": "escape"})})
        assert asked(made, {0: ("step", "go")}) == {0: [None, 1.0, True]}
        assert len(guard.children(recursive=True)) == 4
        made.end(0)
        assert len(guard.children(recursive=True)) == 1


@pytest.mark.parametrize("resumes", [False, True])
def test_the_time_of_an_answer_can_be_paused(resumes: bool) -> None:
    found: list[Any] = []
    with environments("Sleeping", seconds=SHORT) as made:
        made.begin(0, seed=0)
        made.ask(0, "reset", {"seconds": 2 * SHORT})
        made.pause(0)
        if resumes:
            made.resume(0)
        while not found:
            found = made.answers(seconds=1.0)
    assert found == [(0, AnswerFailure("did not answer within 1.5 s", kind="late") if resumes else None)]


def test_random_numbers_are_of_the_episodes_seed() -> None:
    with environments("Throwing") as made:
        for number, seed in enumerate((7, 8, 7)):
            made.begin(number, seed=seed)
        found = asked(made, {number: ("reset", {}) for number in range(3)})
    assert found[0] == found[2] != found[1]
