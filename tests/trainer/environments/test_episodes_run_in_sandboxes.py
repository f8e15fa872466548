"""Episodes with an environment or tools in sandboxes: they answer as forked processes do, and end alone."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_trainer.environments.environments import Environments
from rlhf_trainer.environments.sandboxed import SandboxedEpisodes
from rlhf_trainer.rewards.sandboxes import Sandboxes
from rlhf_trainer.rewards.supervision import AnswerFailure
from tests.trainer.sandbox_pool import Pool, pool

PATIENT = 60.0
SHOP = """
import os, random, time

def count_of(thing):
    return f"12 {thing}"

class Shop:
    def __init__(self, wanted):
        self._wanted = wanted

    def reset(self, row):
        return f"{row['prompt']} {self._wanted} {random.random()}"

    async def step(self, response):
        if response == "leave":
            os.write(2, b"so long\\nbye\\n")
            os._exit(3)
        if response == "sleep":
            time.sleep(100)
        if response == "raise":
            raise ValueError("no")
        if response == "look":
            return str(sorted({*os.listdir(".")} - {"__pycache__"})), 0.0, False
        return "more", 0.5, response == "end"
"""


@pytest.fixture(scope="module")
def made_pool() -> Iterator[tuple[Sandboxes, Pool]]:
    with pool(2) as found:
        yield found


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's that no image has; it is on the trainer's search path."""
    (tmp_path / "shop_of_test.py").write_text(SHOP)
    monkeypatch.syspath_prepend(tmp_path)
    return "shop_of_test"


class Played:
    """An environment whose episodes are in sandboxes."""

    def __init__(self, sandboxes: Sandboxes, *entrypoints: str, seconds: float = 20.0, **arguments: Any) -> None:
        episodes = SandboxedEpisodes(sandboxes, entrypoints, arguments=arguments, patience=PATIENT)
        given: dict[str, Any] = {"arguments": arguments, "path": "job: spec.rollout.environment"}
        self.made = Environments(entrypoints, open_sandbox=episodes.open, seconds=seconds, **given)
        self.made.ready()

    def call(self, number: int, method: str, given: Any) -> Any:
        self.made.ask(number, method, given)
        return self.answer()[1]

    def answer(self) -> tuple[int, Any]:
        """The next answer."""
        end = time.monotonic() + 2 * PATIENT
        while time.monotonic() < end:
            if found := self.made.answers(seconds=1.0):
                return found[0]
        raise AssertionError("no answer")


def test_an_episode_answers_as_one_beside_the_trainer(made_pool: tuple[Sandboxes, Pool], module: str) -> None:
    beside = Environments(
        [f"{module}:Shop"], arguments={"wanted": 2}, seconds=20.0, path="job: spec.rollout.environment"
    )
    beside.ready()
    played = Played(made_pool[0], f"{module}:Shop", wanted=2)
    found: list[list[Any]] = [[], []]
    for answers, each in zip(found, (played.made, beside), strict=True):
        each.begin(0, seed=5)
        for method, given in (("reset", {"prompt": "hello"}), ("step", "go"), ("step", "end")):
            each.ask(0, method, given)
            while not (some := each.answers(seconds=1.0)):
                pass
            answers.append(some[0][1])
        each.close()
    assert found[0] == found[1]
    assert found[0][0].startswith("hello 2 0.")
    assert found[0][2] == [None, 0.5, True]


@pytest.mark.parametrize(
    ("response", "what"),
    [
        ("leave", "ended its process with exit code 3: bye"),
        ("sleep", "did not answer within 3 s"),
        ("raise", "step raised ValueError: no"),
    ],
)
def test_whatever_happens_in_it_is_one_sentence(
    made_pool: tuple[Sandboxes, Pool], module: str, response: str, what: str
) -> None:
    played = Played(made_pool[0], f"{module}:Shop", seconds=3.0, wanted=1)
    played.made.begin(0, seed=1)
    played.call(0, "reset", {"prompt": "a"})
    answer = played.call(0, "step", response)
    assert isinstance(answer, AnswerFailure)
    assert answer.what.startswith(what)
    played.made.end(0)
    played.made.begin(1, seed=1)
    assert isinstance(played.call(1, "reset", {"prompt": "b"}), str), "others go on"
    played.made.close()


def test_it_has_the_files_that_were_sent_along(made_pool: tuple[Sandboxes, Pool], module: str) -> None:
    played = Played(made_pool[0], f"{module}:Shop", wanted=1)
    played.made.begin(0, seed=1)
    played.call(0, "reset", {"prompt": "a"})
    assert played.call(0, "step", "look")[0] == "['episode.json', 'rlhf_api', 'rlhf_trainer', 'shop_of_test.py']"
    played.made.close()


def test_tools_are_called_there(made_pool: tuple[Sandboxes, Pool], module: str) -> None:
    functions = [f"{module}:count_of"]
    played = Played(made_pool[0], "rlhf_trainer.environments.tools:Tools", *functions, functions=functions)
    played.made.begin(0, seed=1)
    assert played.call(0, "reset", {"prompt": "a"}) is None
    messages, _, is_over = played.call(
        0, "step", '<tool_call>{"name": "count_of", "arguments": {"thing": "apples"}}</tool_call>'
    )
    assert (messages[0]["content"], is_over) == ("12 apples", False)
    played.made.close()


def test_more_episodes_than_sandboxes_wait_for_their_turn(made_pool: tuple[Sandboxes, Pool], module: str) -> None:
    played = Played(made_pool[0], f"{module}:Shop", wanted=1)
    for number in range(8):
        played.made.begin(number, seed=number)
        played.made.ask(number, "reset", {"prompt": str(number)})
    found: dict[int, Any] = {}
    while len(found) < 8:
        number, found[number] = played.answer()
        played.made.end(number)
    assert all(found[number].startswith(f"{number} 1 ") for number in range(8))
    played.made.close()


def test_a_module_that_cannot_be_imported_is_named(made_pool: tuple[Sandboxes, Pool], module: str) -> None:
    played = Played(made_pool[0], f"{module}:Missing")
    played.made.begin(0, seed=1)
    answer = played.call(0, "reset", {"prompt": "a"})
    assert isinstance(answer, AnswerFailure)
    assert answer.what.startswith(f"{module}:Missing cannot be imported: AttributeError")


def test_nobody_waits_for_a_sandbox_for_ever(module: str) -> None:
    nobody = Sandboxes("127.0.0.1", 9, 1, 60.0)
    names, arguments = [f"{module}:Shop"], {"wanted": 1}
    episodes = SandboxedEpisodes(nobody, names, arguments=arguments, patience=1.0)
    made = Environments(names, arguments=arguments, path="job: x", open_sandbox=episodes.open, seconds=0.1)
    made.begin(0, seed=1)
    made.ask(0, "reset", {"prompt": "a"})
    while not (found := made.answers(seconds=1.0)):
        pass
    assert found == [(0, AnswerFailure("found no free sandbox within 1 s", kind="no sandbox"))]
