"""Environments of OpenEnv's servers: a session over the server's WebSocket, with texts as actions and observations.

The package `openenv` is not imported: it needs mcp < 2, and vLLM a newer version.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
from websockets.sync.client import connect

INVALID = "VALIDATION_ERROR"
"""Code of a server's error for an action of the wrong form."""


def rows(*, url: str, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield the tasks of a split from the server's task API: dicts are rows, other values get a column `task`."""
    with httpx.Client(base_url=url) as client:
        (name,) = client.get("/list_environments").raise_for_status().json()
        answer = client.post(f"/{name}/tasks", json={"split": split}).raise_for_status()
    for task in answer.json()["tasks"]:
        yield task if isinstance(task, dict) else {"task": task}


class Environment:
    """Environment of one session of a server."""

    def __init__(self, *, url: str, action: str | None = None, observation: str | None = None) -> None:
        """Connect to the server at `url`, http://host:port.

        action: field of the environment's action that gets the model's text; None: the text is an action in JSON.
        observation: field of its observations that is shown to the model; None: all of an observation as JSON.
        """
        self._action, self._observation = action, observation
        self._session = connect(f"ws{url.rstrip('/').removeprefix('http')}/ws", max_size=None)

    def reset(self, row: Mapping[str, Any]) -> str | None:
        """Begin an episode; the row's columns but the prompt are arguments of the environment's `reset`.

        Returns the first observation, or None if the named field is empty, so that the data's prompt is used.
        """
        given = {name: value for name, value in row.items() if name != "prompt"}
        observation = self._ask("reset", given)["observation"]
        return self._text(observation) if self._observation is None or observation.get(self._observation) else None

    def step(self, response: str) -> tuple[str | None, float, bool]:
        """Send an action; returns (text for the model, reward, done). A refused action's text begins with `error`."""
        try:
            action = {self._action: response} if self._action else json.loads(response)
        except ValueError as error:
            return f"error: an action is a JSON object: {error}", 0.0, False
        answer = self._ask("step", action)
        if "code" in answer:
            return f"error: {json.dumps(answer.get('errors'), default=str)}", 0.0, False
        return self._text(answer["observation"]), float(answer["reward"] or 0), bool(answer["done"])

    def _ask(self, kind: str, data: Any) -> dict[str, Any]:
        """Return the data of the server's answer; for an invalid action it has a `code`. Other errors: RuntimeError."""
        self._session.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._session.recv())
        found: dict[str, Any] = answer["data"]
        if answer["type"] == "error" and not (kind == "step" and found["code"] == INVALID):
            raise RuntimeError(f"the server says {found['code']}: {found['message']}")
        return found

    def _text(self, observation: Mapping[str, Any]) -> str:
        every = {name: value for name, value in observation.items() if name != "metadata"}
        shown = every if self._observation is None else every.get(self._observation)
        return shown if isinstance(shown, str) and shown else json.dumps(shown)
