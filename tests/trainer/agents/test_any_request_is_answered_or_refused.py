"""Whatever a program sends to the proxy is answered or refused: one request fails, and no other, and no run."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlhf_trainer.agents.conversation import Conversation
from rlhf_trainer.agents.openai_format import CHAT, COMPLETIONS, RefusalError, read_request
from rlhf_trainer.data.turns import TurnEncoder
from rlhf_trainer.generation.vllm_engine import Response
from tests.each import each_case
from tests.trainer.agents.stage import TEMPLATE
from tests.trainer.tiny import EXAMPLE_MODEL

SHAPES = 400
"""Random requests; about a third of them is answered."""
USER = {"role": "user", "content": "2+2?"}
NAMES = ("role", "content", "tool_calls", "function", "name", "arguments", "type", "text", "parameters", "reasoning")
LEAVES = (
    None,
    True,
    0,
    -1,
    10**400,
    float("nan"),
    "",
    "user",
    "assistant",
    "tool",
    "x",
    "\ud800",
    "{}",
    "[1]",
    "{{ m }}",
)
ASSISTANT, DEEP = {"role": "assistant", "content": ""}, "[" * 600 + "]" * 600


@pytest.fixture(scope="module")
def encoder() -> TurnEncoder:
    tokenizer = AutoTokenizer.from_pretrained(str(EXAMPLE_MODEL))
    tokenizer.chat_template = TEMPLATE.replace("m.content }}", "m.content }}{{ (m.tool_calls or []) | tojson }}")
    return TurnEncoder(tokenizer, chat_template="Never")


def send(talk: Conversation, path: str, **body: Any) -> str:
    """Play one request; returns the refusal's sentence, or `answered`."""
    given = json.loads(json.dumps({"model": "policy", **body}))
    try:
        call = talk.begin(read_request(path, given, model="m", sampling={}))
        answer = Response(tokens=[5, 6, 2], log_probs=[-1.0] * 3, finished=True, versions=[1] * 3)
        json.dumps(talk.end(call, answer))
    except RefusalError as refusal:
        return str(refusal)
    return "answered"


def talk_of(encoder: TurnEncoder) -> Conversation:
    return Conversation(encoder, prompt_tokens=400, tokens=10**6, calls=10**6)


def shape(drawn: random.Random, depth: int = 0) -> Any:
    """A JSON value of the names and values that a request has, in any order."""
    kind = drawn.randrange(3 if depth < 5 else 1)
    if kind == 1:
        return [shape(drawn, depth + 1) for _ in range(drawn.randrange(3))]
    if kind == 2:
        return {drawn.choice(NAMES): shape(drawn, depth + 1) for _ in range(drawn.randrange(4))}
    return drawn.choice(LEAVES)


def message(drawn: random.Random) -> Any:
    """A message of which one or two values are another shape."""
    call = {"function": {"name": "add", "arguments": "{}"}}
    found: dict[str, Any] = drawn.choice((USER, {**ASSISTANT, "tool_calls": [call]}))
    for _ in range(drawn.randrange(3)):
        found = {**found, drawn.choice(NAMES): shape(drawn)}
    if drawn.random() < 0.3:
        found = {**found, "tool_calls": [{"function": {**call["function"], drawn.choice(NAMES): shape(drawn)}}]}
    return shape(drawn) if drawn.random() < 0.05 else found


def test_requests_of_any_shape(encoder: TurnEncoder) -> None:
    drawn, talk = random.Random(1), talk_of(encoder)
    found = []
    for _ in range(SHAPES):
        body: dict[str, Any] = {"messages": [USER, *(message(drawn) for _ in range(drawn.randrange(3)))]}
        if drawn.random() < 0.3:
            body["tools"] = shape(drawn)
        if drawn.random() < 0.2:
            body[drawn.choice(("stop", "max_tokens", "logprobs", "n", "model", "prompt", "seed"))] = shape(drawn)
        found.append(send(talk, drawn.choice((CHAT, CHAT, CHAT, COMPLETIONS)), **body))
    answered = found.count("answered")
    assert SHAPES / 5 < answered < SHAPES / 2
    assert len({*found}) > 20


def called(function: Any) -> list[Any]:
    return [USER, {**ASSISTANT, "tool_calls": [{"function": function}]}, USER]


@each_case(
    ("messages", "sentence"),
    [
        (called({"function": "x"}), "answered"),
        (called({"name": "x", "arguments": f'{{"a": {DEEP}}}'}), "the request is nested more than 64 deep"),
        (called({"name": "x", "arguments": {"a": json.loads(DEEP)}}), "the request cannot be read: RecursionError"),
        ([USER, {**ASSISTANT, "content": None}], "the request has a message whose 'role' or 'content' is not a text"),
    ],
)
def test_a_message_that_nobody_sends_by_chance(encoder: TurnEncoder, messages: Any, sentence: str) -> None:
    talk = talk_of(encoder)
    assert send(talk, CHAT, messages=[USER]) == "answered"
    assert send(talk, CHAT, messages=messages) == sentence
    assert send(talk, CHAT, messages=[USER]) == "answered", "the episode goes on"


def test_names_that_cannot_be_written_are_others() -> None:
    body = {"model": "policy", "messages": [USER], "\ud800": 1, "a b": 1, "a" * 65: 1, "temperature": 1, "top_p": 0.5}
    request = read_request(CHAT, body, model="m", sampling={"top_p": 0.5})
    assert [*request.ignored] == ["temperature", "others"]
