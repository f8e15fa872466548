"""The agents of example 21 ask a model, run its calls of the calculator themselves, and give a reward.

One is a loop of its own. The other is of the OpenAI Agents SDK: pip install openai-agents.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
from typing import Any

import pytest

from tests.trainer.environments.scripted_model import calls, scripted_model

IS_INSTALLED = importlib.util.find_spec("agents") is not None
ROW = {"prompt": "1234*5678%3", "answer": "2"}
CALL = calls("calculate", expression="1234*5678%3")


@pytest.fixture(
    params=[
        "agent",
        pytest.param("openai_agents", marks=pytest.mark.skipif(not IS_INSTALLED, reason="openai-agents is missing")),
    ]
)
def run(request: pytest.FixtureRequest) -> Any:
    module = importlib.import_module(f"rlhf_examples.calculator.{request.param}")

    def run() -> float:
        found = module.run(ROW)
        return asyncio.run(found) if inspect.isawaitable(found) else found

    return run


@pytest.mark.parametrize(("answer", "reward"), [("2", 1.0), ("1", 0.0)])
def test_the_result_of_a_call_is_told_the_model(run: Any, answer: str, reward: float) -> None:
    with scripted_model(CALL, answer) as seen:
        assert run() == reward
    first, second = seen
    assert [each["role"] for each in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][:1] == first["messages"] == [{"role": "user", "content": ROW["prompt"]}]
    assert second["messages"][2]["content"] == "2"
    assert first["tools"][0]["function"]["name"] == "calculate"


def test_a_bad_call_is_told_as_a_text(run: Any) -> None:
    with scripted_model(calls("calculate", expression="1 +"), "2") as seen:
        assert run() == 1.0
    assert "error" in seen[1]["messages"][2]["content"]


def test_calls_without_end_are_wrong(run: Any) -> None:
    with scripted_model(CALL, CALL, CALL):
        assert run() == 0.0


def test_an_answer_without_a_call_is_the_last(run: Any) -> None:
    with scripted_model(" 2 ") as seen:
        assert run() == 1.0
    assert len(seen) == 1
