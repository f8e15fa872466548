"""An agent of the OpenAI Agents SDK (`pip install openai-agents`) for the questions of example 18."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded

from rlhf_examples.calculator.tool import calculate

set_default_openai_api("chat_completions")
set_tracing_disabled(True)
TOOL = function_tool(calculate)


async def run(row: Mapping[str, Any]) -> float:
    """Have the agent answer; return 1 if that is the row's answer, else 0."""
    agent = Agent(name="pupil", tools=[TOOL], model=os.environ["OPENAI_MODEL"])
    try:
        result = await Runner.run(agent, row["prompt"], max_turns=3)
    except MaxTurnsExceeded:
        return 0.0
    return float(str(result.final_output).strip() == row["answer"])
