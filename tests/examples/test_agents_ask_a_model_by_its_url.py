"""The agents of example 21 ask a model, run its calls of the calculator themselves, and give a reward.

One is a loop of its own. The other is of the OpenAI Agents SDK: pip install openai-agents.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.trainer.environments.scripted_model import calls, scripted_model

ROW = {"prompt": "1234*5678%3", "answer": "2"}


def written(name: str, **arguments: Any) -> str:
    """A call of a tool as the model of example 18 writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


Agent = tuple[Callable[[], float], Callable[..., Any]]
AGENTS = {"agent": written, "openai_agents": calls}
"""Modules of the agents, and what a call looks like to each."""


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> Agent:
    """What runs an agent, and what makes a call that it understands."""
    if request.param == "openai_agents":
        pytest.importorskip("agents")
    module = importlib.import_module(f"rlhf_examples.calculator.{request.param}")

    def run() -> float:
        found: Any = module.run(ROW)
        reward: float = asyncio.run(found) if inspect.iscoroutine(found) else found
        return reward

    return run, partial(AGENTS[request.param], "calculate")


@pytest.mark.parametrize(("answer", "reward"), [("2", 1.0), ("1", 0.0)])
def test_the_result_of_a_call_is_told_the_model(agent: Agent, answer: str, reward: float) -> None:
    run, call = agent
    with scripted_model(call(expression=ROW["prompt"]), answer) as seen:
        assert run() == reward
    first, second = seen
    assert [each["role"] for each in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][:1] == first["messages"] == [{"role": "user", "content": ROW["prompt"]}]
    assert second["messages"][2]["content"] == "2"


@pytest.mark.parametrize("expression", ["1 +", "1/0", "len(x)"])
def test_a_bad_call_is_told_as_a_text(agent: Agent, expression: str) -> None:
    run, call = agent
    with scripted_model(call(expression=expression), "2") as seen:
        assert run() == 1.0
    assert "error" in seen[1]["messages"][2]["content"]


def test_calls_without_end_are_wrong(agent: Agent) -> None:
    run, call = agent
    with scripted_model(*[call(expression="1+1")] * 3):
        assert run() == 0.0


def test_an_answer_without_a_call_is_the_last(agent: Agent) -> None:
    with scripted_model(" 2 ") as seen:
        assert agent[0]() == 1.0
    assert len(seen) == 1
