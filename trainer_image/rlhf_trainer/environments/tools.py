"""Tools: an environment that calls the user's functions as the model asks, and says what they return."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_trainer.rewards.function import imported, place_of

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
"""How models write a call: {"name": ..., "arguments": {...}} as JSON within these tags."""


class Tools:
    """An answer without a call ends the episode; each call of another is answered by a message of the role `tool`.

    What a model does wrong, and what a function raises, it is told as an answer that begins with `error`.
    """

    def __init__(self, functions: Sequence[str]) -> None:
        self._functions = {each.partition(":")[2]: imported(each) for each in functions}

    def schemas(self, _: None) -> list[dict[str, Any]]:
        """What chat templates are given, made of each function's signature and docstring."""
        from transformers.utils import get_json_schema  # seconds that no episode needs

        found = []
        for function in self._functions.values():
            try:
                found.append(get_json_schema(function))
            except Exception as error:
                raise ValueError(f"{error}{place_of(function)}") from error
        return found

    def reset(self, _: Mapping[str, Any]) -> None:
        """The prompt stays as it is."""

    async def step(self, response: str) -> tuple[list[dict[str, str]] | None, float, bool]:
        """(an answer to each call, 0, whether there was none)."""
        calls = CALL.findall(response)
        said = [{"role": "tool", "name": name, "content": text} for name, text in [await self._call(c) for c in calls]]
        return said or None, 0.0, not said

    async def _call(self, call: str) -> tuple[str, str]:
        """(the name of the function, what it returned as a text)."""
        try:
            asked = json.loads(call)
            name, arguments = asked["name"], asked.get("arguments") or {}
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
