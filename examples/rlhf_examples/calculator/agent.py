"""An agent of example 21: a loop of its own with its own calculator. It knows the OpenAI client, and no trainer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from openai import OpenAI

from rlhf_examples.calculator.tool import calculate

CALLS, CALL = 3, re.compile("<tool_call>(.*)</tool_call>")
# Episodes are forks of this process: what is imported and made here is not made again.
CLIENT = OpenAI(base_url="http://localhost", api_key="set for each episode")
CLIENT.chat.completions  # noqa: B018 imports what a call needs


def run(row: Mapping[str, Any]) -> float:
    """Ask the model until an answer holds no call; return 1 if that is the row's answer, else 0."""
    client = CLIENT.with_options(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(CALLS):
        answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        text = answer.choices[0].message.content or ""
        call = CALL.search(text)
        if not call:
            return float(text.strip() == row["answer"])
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "tool", "tool_call_id": "calculator", "content": _result(call[1])})
    return 0.0


def _result(call: str) -> str:
    try:
        return calculate(**json.loads(call)["arguments"])
    except (ValueError, TypeError, LookupError, SyntaxError, ArithmeticError) as error:
        return f"error: {error}"
