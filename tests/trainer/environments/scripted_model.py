"""A server of chat completions that gives each call the next answer of a script, in one piece or as a stream."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.trainer.rewards.stub_server import Handler, served

MADE: dict[str, Any] = {"id": "1", "created": 1, "model": "policy"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    """An answer that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "call-1", "type": "function", "function": function}]}


def _whole(message: dict[str, Any], end: str) -> bytes:
    choice = {"index": 0, "message": message, "finish_reason": end}
    return json.dumps({**MADE, "object": "chat.completion", "choices": [choice], "usage": USAGE}).encode()


def _streamed(message: dict[str, Any], end: str) -> bytes:
    chunk = {**MADE, "object": "chat.completion.chunk"}
    parts = [{"index": 0, "delta": message, "finish_reason": None}, {"index": 0, "delta": {}, "finish_reason": end}]
    chunks = [*({**chunk, "choices": [part]} for part in parts), {**chunk, "choices": [], "usage": USAGE}]
    return "".join(f"data: {each}\n\n" for each in [*map(json.dumps, chunks), "[DONE]"]).encode()


@contextmanager
def scripted_model(*script: str | dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The variables of an episode lead to the script while the block runs; yields the requests, which it fills."""
    seen: list[dict[str, Any]] = []

    def behave(handler: Handler, request: dict[str, Any]) -> None:
        said = script[len(seen)]
        seen.append(request)
        message = {"role": "assistant", **(said if isinstance(said, dict) else {"content": said})}
        end = "tool_calls" if "tool_calls" in message else "stop"
        is_stream = request.get("stream", False)
        kind = "text/event-stream" if is_stream else "application/json"
        handler.answer((_streamed if is_stream else _whole)(message, end), Content_Type=kind)

    with served(behave) as url:
        names = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "key", "OPENAI_MODEL": "policy", "NO_PROXY": "127.0.0.1"}
        with patch.dict(os.environ, names):
            yield seen
