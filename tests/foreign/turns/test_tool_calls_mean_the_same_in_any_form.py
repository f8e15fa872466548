"""Arguments as text or dict, tools as text, and the nulls of a table give the same tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_trainer.chat import read_tools
from tests.each import each_case
from tests.foreign.turns.encoding import encoder_of, fault, learned
from tests.foreign.turns.families import ADD, CALL, FAMILIES, TOOL_TALK, tokenizer_of

PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}]
WITH_NULLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {**PARAMETERS, "properties": {"a": {"type": "number", "enum": None}, "city": None}},
        },
    }
]
NO_MAPPINGS = "holds tools or tool calls that are no list of mappings"


def talk_with(**changes: Any) -> list[dict[str, Any]]:
    """TOOL_TALK with another form of its call."""
    return [TOOL_TALK[0], {**TOOL_TALK[1], **changes}, *TOOL_TALK[2:]]


def call_with(arguments: object) -> dict[str, Any]:
    return {**ADD, "function": {"name": "add", "arguments": arguments}}


FORMS = {
    "arguments as text": talk_with(tool_calls=[call_with('{"a": 3, "b": 4}')]),
    "nulls of other tools": talk_with(tool_calls=[{**call_with({"a": 3, "b": 4, "city": None}), "id": None}]),
    "no content": talk_with(content=None),
    "calls as text": talk_with(tool_calls=json.dumps([ADD])),
    "nulls beside": [{**each, "tool_call_id": None, "tool_calls": each.get("tool_calls")} for each in TOOL_TALK],
}


@each_case("form", FORMS)
@each_case("name", ["chatml", "thinking", "llama", "r1", "mistral"])
def test_a_call_is_the_same_in_any_form(name: str, form: str) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(FAMILIES[name])
    call, _ = learned(encoder_of(family, tokenizer, FORMS[form]), tokenizer)
    assert call == family.call


@pytest.mark.parametrize("tools", [json.dumps(TOOLS), [json.dumps(TOOLS[0])], WITH_NULLS], ids=["text", "each", "null"])
def test_tools_are_the_same_in_any_form(tools: object) -> None:
    family, tokenizer = FAMILIES["chatml"], tokenizer_of(FAMILIES["chatml"])
    expected = encoder_of(family, tokenizer, TOOL_TALK, TOOLS)
    assert encoder_of(family, tokenizer, TOOL_TALK, tools).prompts() == expected.prompts()
    assert learned(encoder_of(family, tokenizer, TOOL_TALK, tools), tokenizer)[0] == CALL


def test_a_null_in_a_text_of_arguments_is_meant() -> None:
    family, tokenizer = FAMILIES["chatml"], tokenizer_of(FAMILIES["chatml"])
    talk = talk_with(tool_calls=[call_with('{"a": null}')])
    assert '"arguments": {"a": null}' in learned(encoder_of(family, tokenizer, talk), tokenizer)[0]


def test_arguments_are_never_written_as_python() -> None:
    """Some templates print what they get, which is JSON for a text only."""
    family, tokenizer = FAMILIES["chatml"], tokenizer_of(FAMILIES["chatml"])
    tokenizer.chat_template = str(tokenizer.chat_template).replace("arguments | tojson", "arguments")
    assert learned(encoder_of(family, tokenizer, TOOL_TALK), tokenizer)[0] == CALL


@each_case("calls", ["add", '{"name": "add"}', ["3"], [{"function": "add"}]])
def test_a_call_that_is_none_is_a_fault(calls: object) -> None:
    family, tokenizer = FAMILIES["chatml"], tokenizer_of(FAMILIES["chatml"])
    assert fault(encoder_of(family, tokenizer, talk_with(tool_calls=calls))) == NO_MAPPINGS


def test_tools_that_are_none_are_a_fault() -> None:
    family, tokenizer = FAMILIES["chatml"], tokenizer_of(FAMILIES["chatml"])
    assert fault(encoder_of(family, tokenizer, TOOL_TALK, "[add")) == NO_MAPPINGS


@each_case("tools", ["", "null", "[]", []])
def test_an_empty_text_is_no_tools(tools: object) -> None:
    assert read_tools(tools) == []
