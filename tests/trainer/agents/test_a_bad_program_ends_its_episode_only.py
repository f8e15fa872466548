"""Whatever a program does is one sentence, its row is counted, and nothing that it has started is left running."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_api.spec.rollout import AgentProgram
from rlhf_trainer.agents.conversation import Conversation
from rlhf_trainer.agents.programs import Agent
from rlhf_trainer.environments.of_job import try_environment
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.rewards.function import WrongAnswerError
from rlhf_trainer.rewards.supervision import AnswerFailure
from rlhf_trainer.workers.agents import Program, ProgramRunner
from tests.each import each_case
from tests.patience import PATIENCE_SECONDS
from tests.trainer.agents.stage import Troupe
from tests.trainer.agents.test_the_tree_holds_what_was_sampled import END, Letters, answer

FAILED = {
    "nothing": "gave no reward",
    "quits_refused": "ended its process with exit code 3",
    "ignores": "ended without an answer of the model",
    "posts_twice": "gave two rewards",
    "posts_and_returns": "gave two rewards",
    "posts_nan": "posted as reward nan, expected a finite number (float32)",
    "returns_text": "run gave as reward a value of type str, expected a number",
}
"""Behaviour of a program -> why nothing is learned from its episode."""
SHORT = 1.5


@pytest.fixture(scope="module")
def troupe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    others = psutil.Process().children()
    made = Troupe(tmp_path_factory.mktemp("agents"))
    yield made
    made.close()
    assert not [each for each in psutil.Process().children() if each not in others]
    assert not connections(made), "the server has ended"


def processes() -> set[int]:
    return {each.pid for each in psutil.Process().children(recursive=True)}


def connections(troupe: Troupe) -> list[int]:
    """The ports of the other ends of all sockets of the proxy."""
    runner = troupe.responder._runner
    assert isinstance(runner, ProgramRunner)
    port = int(runner._proxy.url.removesuffix("/v1").rpartition(":")[2])
    found = [each for each in psutil.Process().net_connections("tcp") if each.laddr.port == port]
    return [each.raddr.port if each.raddr else 0 for each in found]


def test_failures_are_counted_and_others_go_on(troupe: Troupe) -> None:
    *failed, broken, well = troupe.play(*({"does": each} for each in (*FAILED, "breaks", "plain")))
    assert [each.failure for each in failed] == list(FAILED.values())
    assert broken.failure.startswith("run raised ZeroDivisionError: division by zero (")
    assert "user_agents.py:" in broken.failure
    assert (well.failure, sum(well.rewards.values())) == ("", 1.0)
    assert troupe.batch["played"].tolist() == [0.0] * 8 + [1.0]
    assert troupe.report.sums["episodes/failed"] == 8
    first = f"tests.trainer.agents.user_agents:run failed in 8 of 9 episodes; the first: {FAILED['nothing']}"
    assert troupe.report.warnings["episodes/failed"] == f"talk: spec.rollout.agent: {first}"


def test_a_bad_request_gets_a_sentence(troupe: Troupe, tmp_path: Path) -> None:
    (played,) = troupe.play({"does": "misused", "told": str(tmp_path / "told")})
    assert (played.failure, sum(played.rewards.values()), played.facts["calls"]) == ("", 1.0, 1)
    assert (tmp_path / "told").read_text().splitlines() == [
        "413 the request has more than 1048576 bytes",
        "400 the request has a message of role 'user' with a part of type 'image_url'; only texts are read",
        "400 the request has n 2, expected 1",
        "400 the request has [0] as most tokens, expected a whole number, at least 1",
        "400 the request holds nothing as messages, expected a list",
        "400 the request has top_logprobs 3, expected 0",
        "404 there is no model 'gpt-5', expected 'policy'",
        "401 the key is that of no running episode",
    ]
    assert troupe.report.sums["episodes/refused"] == 7, "nobody knows whose the last one was"


def test_a_closed_connection_ends_its_call(troupe: Troupe) -> None:
    (played,) = troupe.play({"does": "hangs_up"})
    assert (played.failure, sum(played.rewards.values()), played.facts["calls"]) == ("", 1.0, 1)
    assert (played.facts["dropped"], len(troupe.engine.aborted)) == (1, 1)
    assert all(played.response.written), "nothing of the call is kept"


def test_what_a_program_leaves_behind_is_ended(troupe: Troupe) -> None:
    before = processes()
    left, unfinished = troupe.play({"does": "leaves"}, {"does": "unfinished"})
    assert (left.failure, unfinished.failure) == ("", "")
    assert unfinished.facts["dropped"] == 1
    assert processes() == before, "also what had a session of its own"
    until = time.monotonic() + PATIENCE_SECONDS
    while connections(troupe) != [0] and time.monotonic() < until:
        time.sleep(0.01)
    assert connections(troupe) == [0], "the door alone is open"
    assert not troupe.engine.is_busy


def test_a_program_that_hangs_is_ended_alone(tmp_path: Path) -> None:
    troupe = Troupe(tmp_path, seconds=SHORT)
    before = processes()
    hung, _ = troupe.play({"does": "hangs"}, None)
    assert hung.failure == "did not answer within 1.5 s"
    assert processes() == before
    troupe.close()


@each_case(
    ("kind", "limit", "failure"),
    [
        ("raised", "", "x"),
        ("raised", "no room", ""),
        *((kind, "no room", "x") for kind in ("ended", "lost", "late", "no sandbox")),
    ],
)
def test_only_its_own_error_is_excused_after_a_limit(kind: Any, limit: str, failure: str) -> None:
    talk = Conversation(Letters(), prompt_tokens=9, tokens=9, calls=9)  # type: ignore[arg-type]
    answer(talk, "a", [101, END])
    talk.limit = limit
    found = AnswerFailure("x", kind=kind)
    assert Program(0, talk).end(found, [], needs_reward=True).failure == failure


@pytest.mark.parametrize(("code", "kind"), [("exit(3)", "raised"), ("import os; os.kill(os.getpid(), 9)", "ended")])
def test_a_killed_command_has_no_error_of_its_own(code: str, kind: str) -> None:
    agent = Agent(entrypoint=None, command=[sys.executable, "-S", "-c", code], arguments=None)
    with pytest.raises(WrongAnswerError, match="no result, as the command") as caught:
        agent.run({"row": {}, "variables": {}})
    assert caught.value.kind == kind


PROGRAMS: list[tuple[dict[str, Any], str]] = [
    ({"entrypoint": "json:dumps", "arguments": {"obj": 1}}, "multiple values for argument 'obj'"),
    ({"entrypoint": "os.path:exists", "arguments": {"n": 1}}, "got an unexpected keyword argument 'n'"),
    ({"command": ["no-such-program", "a.py"]}, "there is no program no-such-program"),
    ({"command": [sys.executable, "-c", "pass"]}, ""),
]


@each_case(("program", "error"), PROGRAMS)
def test_what_would_end_every_episode_is_told_before_the_run(
    program: dict[str, Any], error: str, troupe: Troupe
) -> None:
    rollout = troupe.job.spec.rollout.model_copy(update={"agent": AgentProgram(**program)})
    job = troupe.job.model_copy(update={"spec": troupe.job.spec.model_copy(update={"rollout": rollout})})
    told = (
        pytest.raises(UserCodeError, match=f"spec.rollout.agent: .* check raised .*{error}") if error else nullcontext()
    )
    with told:
        try_environment(job, {"check": None})
