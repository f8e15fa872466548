"""An agent of example 21: a loop of its own with its own calculator. It knows the OpenAI client, and no trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from openai import OpenAI

from rlhf_examples.calculator.tool import calculate

CALLS = 3
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS: Any = [{"type": "function", "function": {"name": "calculate", "parameters": PARAMETERS}}]
CLIENT = OpenAI(base_url="http://localhost", api_key="of an episode")  # made once: an episode's process is a fork
CREATE = CLIENT.chat.completions.create  # imports what it needs


def run(row: Mapping[str, Any]) -> float:
    """Ask the model until an answer calls no tool; return 1 if that is the row's answer, else 0."""
    client = CLIENT.with_options(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(CALLS):
        answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=TOOLS)
        said = answer.choices[0].message
        if not said.tool_calls:
            return float((said.content or "").strip() == row["answer"])
        messages.append(said.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": _result(call)} for call in said.tool_calls]
    return 0.0


def _result(call: Any) -> str:
    try:
        return calculate(**json.loads(call.function.arguments))
    except (ValueError, TypeError, SyntaxError, ArithmeticError) as error:
        return f"error: {error}"
