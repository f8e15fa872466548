"""A server of OpenEnv is an environment: a session for an episode, texts or JSON as actions.

A stand-in that speaks its protocol is always there, the server of the package where it is: pip install openenv.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from websockets.sync.server import ServerConnection, serve

from rlhf_trainer.environments.environments import Environments
from rlhf_trainer.environments.openenv_environments import rows
from rlhf_trainer.rewards.supervision import AnswerFailure
from tests.patience import PATIENCE_SECONDS
from tests.trainer.environments.test_whatever_an_environment_does_ends_its_episode_only import PATIENT, asked

SERVED = "rlhf_trainer.environments.openenv_environments:Environment"
INVALID = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [{"loc": ["number"]}]}
FAILED = {"message": "a guess of less than nothing", "code": "EXECUTION_ERROR"}


def speak(session: ServerConnection) -> None:
    """Play the game of openenv_server.py with one client."""
    number, left = 0, 3
    for message in map(json.loads, session):
        data, kind = message["data"], "observation"
        if message["type"] == "reset":
            number = data.get("number", 0)
            said: Any = {"observation": {"text": data.get("question", "")}, "reward": None, "done": False}
        elif not isinstance(data, dict) or not str(data.get("number")).lstrip("-").isdigit():
            kind, said = "error", INVALID
        elif (guess := int(data["number"])) < 0:
            kind, said = "error", FAILED
        else:
            left -= 1
            text = "right" if guess == number else "more" if guess < number else "less"
            said = {
                "observation": {"text": text},
                "reward": float(guess == number),
                "done": text == "right" or not left,
            }
        session.send(json.dumps({"type": kind, "data": said}))


@contextmanager
def stand_in() -> Iterator[str]:
    with serve(speak, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


@contextmanager
def of_the_package() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "tests.trainer.environments.openenv_server", str(port)]
    with subprocess.Popen(command) as server:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE_SECONDS
        while not _is_there(url):
            assert server.poll() is None, "the server does not start"
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.1)
        yield url
        server.terminate()


def _is_there(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.HTTPError:
        return False


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


IS_INSTALLED = importlib.util.find_spec("openenv") is not None
needs_the_package = pytest.mark.skipif(not IS_INSTALLED, reason="the package openenv is not installed")


@pytest.fixture(
    params=[stand_in, pytest.param(of_the_package, marks=needs_the_package)], ids=lambda each: each.__name__
)
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with request.param() as address:
        yield address


@contextmanager
def episodes(count: int, **arguments: Any) -> Iterator[Environments]:
    path = "job: spec.rollout.environment"
    made = Environments([SERVED], arguments=arguments, seconds=PATIENT, path=path)
    for number in range(count):
        made.begin(number, seed=number)
    yield made
    made.close()


def test_each_episode_is_a_session_of_its_own(url: str) -> None:
    with episodes(2, url=url, action="number", observation="text") as made:
        first = asked(
            made, {number: ("reset", {"prompt": "x", "number": number, "question": "?"}) for number in (0, 1)}
        )
        assert first == {0: "?", 1: "?"}
        assert asked(made, {0: ("step", "0"), 1: ("step", "0")}) == {0: [None, 1.0, True], 1: ["more", 0.0, False]}
        assert asked(made, {1: ("step", "1")}) == {1: [None, 1.0, True]}


def test_an_action_may_be_json_and_a_bad_one_is_told(url: str) -> None:
    with episodes(1, url=url, observation="text") as made:
        asked(made, {0: ("reset", {"number": 3, "question": "?"})})
        for wrong in ("three", '{"number": "x"}', "[1]"):
            said, reward, done = asked(made, {0: ("step", wrong)})[0]
            assert said.startswith("error: ")
            assert (reward, done) == (0.0, False)
        assert asked(made, {0: ("step", '{"number": 4}')}) == {0: ["less", 0.0, False]}


def test_without_a_field_all_of_an_observation_is_shown(url: str) -> None:
    with episodes(1, url=url, action="number") as made:
        assert asked(made, {0: ("reset", {"question": "?"})}) == {0: '{"text": "?"}'}


def test_an_empty_first_observation_leaves_the_datas_prompt(url: str) -> None:
    with episodes(1, url=url, observation="text") as made:
        assert asked(made, {0: ("reset", {"prompt": "Guess.", "question": ""})}) == {0: None}


def test_what_fails_in_the_server_ends_the_episode(url: str) -> None:
    with episodes(1, url=url, action="number", observation="text") as made:
        asked(made, {0: ("reset", {})})
        failure = asked(made, {0: ("step", "-1")})[0]
    assert isinstance(failure, AnswerFailure)
    assert "the server says EXECUTION_ERROR: a guess of less than nothing" in failure.what


def test_a_server_that_is_not_there_is_a_sentence() -> None:
    with episodes(1, url=f"http://127.0.0.1:{free_port()}") as made:
        failure = asked(made, {0: ("reset", {})})[0]
    assert isinstance(failure, AnswerFailure)
    assert failure.what.startswith("__init__ raised ConnectionRefusedError")


@needs_the_package
def test_the_tasks_of_a_server_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with of_the_package() as url:
        assert list(rows(url=url)) == [{"question": "train?", "number": number} for number in (0, 1)]
        assert list(rows(url=url, split="test")) == [{"task": "a"}, {"task": "b"}]
