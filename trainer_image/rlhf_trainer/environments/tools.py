"""Tools: an environment that calls functions of the user's for the model, and returns their results to it."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_trainer.rewards.function import imported, place_of

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
"""Pattern of a tool call in a response: JSON {"name": ..., "arguments": {...}} within <tool_call> and </tool_call>."""


class Tools:
    """Environment of tools: each call in a model's answer gets a message of the role `tool`.

    An answer without a call ends the episode. A bad call, or an exception in a function, is returned to the model as
    text starting with `error`.
    """

    def __init__(self, functions: Sequence[str]) -> None:
        self._functions = {each.partition(":")[2]: imported(each) for each in functions}

    def schemas(self, _: None) -> list[dict[str, Any]]:
        """Return the JSON schema of each function for chat templates, made from its signature and docstring."""
        from transformers.utils import get_json_schema  # a slow import that no episode needs

        found = []
        for function in self._functions.values():
            try:
                found.append(get_json_schema(function))
            except Exception as error:
                raise ValueError(f"{error}{place_of(function)}") from error
        return found

    def reset(self, _: Mapping[str, Any]) -> None:
        """Begin an episode; returns None, so the prompt of the data is used unchanged."""

    async def step(self, response: str) -> tuple[list[dict[str, str]] | None, float, bool]:
        """Run the tool calls in a response; returns (messages with their results, reward 0, True without a call)."""
        calls = CALL.findall(response)
        results = [await self._call(call) for call in calls]
        messages = [{"role": "tool", "name": name, "content": text} for name, text in results]
        return messages or None, 0.0, not messages

    async def _call(self, call: str) -> tuple[str, str]:
        """Run one tool call of the model; returns (the function's name, its result as text)."""
        try:
            request = json.loads(call)
            name, arguments = request["name"], request.get("arguments") or {}
            function: Callable[..., Any] = self._functions[name]
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            known = ", ".join(self._functions)
            return "", f"error: no call of {known}: {type(error).__name__}: {error}"
        try:
            found = function(**arguments)
            found = await found if inspect.isawaitable(found) else found
            return str(name), found if isinstance(found, str) else json.dumps(found, default=str)
        except Exception as error:  # noqa: BLE001 whatever the user's function does
            return str(name), f"error: {type(error).__name__}: {error}"
