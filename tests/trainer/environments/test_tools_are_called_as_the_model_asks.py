"""Tools are functions with a signature: the chat template gets their schemas, and calls are answered by messages."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from rlhf_trainer.environments.tools import Tools

HERE = "tests.trainer.environments.user_environments"


@pytest.fixture
def tools() -> Tools:
    return Tools([f"{HERE}:add", f"{HERE}:divide", f"{HERE}:keys"])


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_schemas_come_from_signatures_and_docstrings(tools: Tools) -> None:
    add, divide, _ = (each["function"] for each in tools.schemas(None))
    assert (add["name"], divide["name"]) == ("add", "divide")
    assert add["description"] == "Add two numbers."
    assert add["parameters"]["properties"]["one"] == {"type": "integer", "description": "The first."}
    assert add["parameters"]["required"] == ["one", "other"]


def test_a_function_that_has_no_schema_is_told_with_its_line() -> None:
    with pytest.raises(ValueError, match=r"secret because it has no docstring! \(/\S+/user_environments\.py:\d+\)$"):
        Tools([f"{HERE}:secret"]).schemas(None)


def test_each_call_is_answered(tools: Tools) -> None:
    response = f"Let me see. {call('add', one=2, other=3)}{call('divide', one=1, other=4)}"
    observation, reward, done = asyncio.run(tools.step(response))
    assert (reward, done) == (0.0, False)
    assert observation == [
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "tool", "name": "divide", "content": "0.25"},
    ]


def test_an_answer_without_a_call_ends_the_episode(tools: Tools) -> None:
    assert asyncio.run(tools.step("It is 5.")) == (None, 0.0, True)


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (call("divide", one=1, other=0), "error: ZeroDivisionError: float division by zero|error: .*division by zero"),
        (call("add", one=1), "error: TypeError: .*missing 1 required positional argument: 'other'"),
        (call("subtract", one=1), "error: no call of add, divide, keys: KeyError: 'subtract'"),
        ("<tool_call>add 2 and 3</tool_call>", "error: no call of add, divide, keys: JSONDecodeError: .*"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "error: no call of add, divide, keys: RecursionError: .*"),
        (call("keys"), "error: TypeError: keys must be .*"),
        ("<tool_call>[]</tool_call>", "error: no call of add, divide, keys: TypeError: .*"),
        (f"<tool_call>{json.dumps({'name': 'add', 'arguments': 7})}</tool_call>", "error: TypeError: .*"),
    ],
)
def test_a_wrong_call_is_told_to_the_model(tools: Tools, response: str, said: str) -> None:
    observation, _, done = asyncio.run(tools.step(response))
    assert not done
    assert observation is not None
    (message,) = observation
    assert re.fullmatch(said, message["content"]), message["content"]
