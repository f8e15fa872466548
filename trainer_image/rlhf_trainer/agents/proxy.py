"""HTTP server between programs and the model, in OpenAI's format: one for each engine, in a thread of its own.

It knows no engine: requests wait in a queue, in the order of their arrival, until a loop takes them.
"""

import asyncio
import json
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rlhf_trainer.agents.openai_format import CHAT, COMPLETIONS, MODEL, REWARD, RefusalError

HOST, MAX_BYTES, MAX_PENDING = "127.0.0.1", 2**20, 32
"""Address of the server, most bytes of a request, and most requests of an episode that wait for their answers."""


@dataclass(frozen=True, eq=False)
class Posted:
    """Request of a program, which waits for the answer."""

    key: str
    path: str
    body: Mapping[str, Any]
    answer: asyncio.Future[web.Response]
    arrived: float = field(default_factory=time.monotonic)

    def reply(self, body: Mapping[str, Any], *, status: int = 200, streams: bool = False) -> None:
        """Send the answer, a JSON object, from any thread; streams: as the only event of a stream."""
        text, kind = json.dumps(body), "application/json"
        if streams:
            text, kind = f"data: {text}\n\ndata: [DONE]\n\n", "text/event-stream"
        response = web.Response(text=text, status=status, content_type=kind)
        self.answer.get_loop().call_soon_threadsafe(self._set, response)

    def _set(self, response: web.Response) -> None:
        if not self.answer.done():
            self.answer.set_result(response)


class Proxy:
    """Server for the programs of many episodes, each of which has a key of its own."""

    def __init__(self) -> None:
        """Start the server on a free port of this machine's own interface."""
        self._news: queue.SimpleQueue[tuple[Posted, bool]] = queue.SimpleQueue()
        self._keys, self._pending, self._refused = set[str](), Counter[str](), Counter[str]()
        """Keys of the running episodes; numbers of requests under way, and refused here, by key."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        app = web.Application(client_max_size=MAX_BYTES)
        app.add_routes([web.post(path, self._post) for path in (CHAT, COMPLETIONS, REWARD)])
        app.add_routes([web.get("/v1/models", self._models)])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        self._await(self._runner.setup())
        self._await(web.TCPSite(self._runner, HOST, 0).start())
        self.url = f"http://{HOST}:{self._runner.addresses[0][1]}/v1"
        """Value of OPENAI_BASE_URL."""

    def open(self) -> str:
        """Return the key of a new episode, by which its requests are known."""
        self._keys.add(key := secrets.token_urlsafe(24))
        return key

    def forget(self, key: str) -> int:
        """Refuse what is sent by an episode's key from now on; returns the number of requests refused so far."""
        self._keys.discard(key)
        return self._refused.pop(key, 0)

    def news(self, *, seconds: float) -> list[tuple[Posted, bool]]:
        """Return (request, whether its program does not wait for the answer any more) of all news in their order.

        seconds: longest wait for the first.
        """
        found = list[tuple[Posted, bool]]()
        with suppress(queue.Empty):
            while True:
                found.append(self._news.get(block=not found and seconds > 0, timeout=seconds))
        return found

    def close(self) -> None:
        """End the server and its thread."""
        self._await(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _await(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "rlhf"}]})

    async def _post(self, request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            if key not in self._keys:
                raise RefusalError(401, "the key is that of no running episode")
            body = await _body_of(request)
            if self._pending[key] >= MAX_PENDING:
                raise RefusalError(429, f"{MAX_PENDING} requests of the episode wait for their answers")
        except RefusalError as refusal:
            self._refused[key] += key in self._keys
            headers = {"Retry-After": "1"} if refusal.status == 429 else {}
            return web.json_response(refusal.body, status=refusal.status, headers=headers)
        posted = Posted(key, request.path, body, self._loop.create_future())
        self._pending[key] += 1
        self._news.put((posted, False))
        try:
            return await posted.answer
        except asyncio.CancelledError:  # the program has closed the connection
            self._news.put((posted, True))
            raise
        finally:
            self._pending -= Counter([key])  # it drops a key without requests


async def _body_of(request: web.Request) -> Mapping[str, Any]:
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise RefusalError(413, f"the request has more than {MAX_BYTES} bytes") from None
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RefusalError(400, "the body is no JSON object")
    return body
