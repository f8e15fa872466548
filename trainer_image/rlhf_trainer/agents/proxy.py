"""HTTP server between programs and the model, in OpenAI's format: one for each engine, in a thread of its own.

It knows no engine: requests wait in a queue until `ProgramRunner` takes them.
"""

import asyncio
import json
import queue
import secrets
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from rlhf_trainer.agents.openai_format import CHAT, COMPLETIONS, MODEL, REWARD, RefusalError

PATHS = (CHAT, COMPLETIONS, REWARD)
HOST, MAX_BYTES, MAX_PENDING = "127.0.0.1", 2**20, 32
"""Address of the server, most bytes of a request, and most requests of an episode that wait for their answers."""
ENDED = "the key is that of no running episode"
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PendingRequest:
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


@dataclass
class Requests:
    """Requests of a running episode."""

    under_way: int = 0
    read: int = 0
    """Number of requests whose body was read."""
    refused: int = 0
    pending: set[PendingRequest] = field(default_factory=set)


class Proxy:
    """Server for the programs of many episodes, each of which has a key of its own."""

    def __init__(self, *, requests: int) -> None:
        """Start the server on a free port of this machine's own interface. requests: most requests of an episode."""
        self._most = requests
        self._received: queue.SimpleQueue[tuple[PendingRequest, bool]] = queue.SimpleQueue()
        self._episodes: dict[str, Requests] = {}
        """Requests of each running episode by its key."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        app = web.Application(client_max_size=MAX_BYTES)
        app.add_routes([web.get("/v1/models", self._models), web.route("*", "/{path:.*}", self._answer)])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        self._await(self._runner.setup())
        self._await(web.TCPSite(self._runner, HOST, 0).start())
        self.url = f"http://{HOST}:{self._runner.addresses[0][1]}/v1"
        """Value of OPENAI_BASE_URL."""

    def open(self) -> str:
        """Return the key of a new episode, which each of its requests must have."""
        self._episodes[key := secrets.token_urlsafe(24)] = Requests()
        return key

    def forget(self, key: str) -> int:
        """Refuse an episode's open requests, and all later ones; returns the number of requests refused before."""
        return self._await(self._forget(key))

    async def _forget(self, key: str) -> int:
        episode, ended = self._episodes.pop(key), RefusalError(401, ENDED)
        for each in episode.pending:
            each.reply(ended.body, status=ended.status)
        return episode.refused

    def received(self, *, seconds: float) -> list[tuple[PendingRequest, bool]]:
        """Return (request, whether its program has stopped waiting for the answer) of all received requests, in order.

        seconds: longest wait for the first request.
        """
        found = list[tuple[PendingRequest, bool]]()
        with suppress(queue.Empty):
            while True:
                found.append(self._received.get(block=not found and seconds > 0, timeout=seconds))
        return found

    def close(self) -> None:
        """End the server and its thread."""
        self._await(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "rlhf"}]})

    async def _answer(self, request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        episode = self._episodes.get(key, Requests())
        episode.under_way += 1
        try:
            pending = await self._pending(key, episode, request)
        except RefusalError as refusal:
            episode.refused += 1
            headers = {"Retry-After": "1"} if refusal.status == 429 else {}
            return web.json_response(refusal.body, status=refusal.status, headers=headers)
        else:
            return await self._answered(pending, episode)
        finally:
            episode.under_way -= 1

    async def _pending(self, key: str, episode: Requests, request: web.Request) -> PendingRequest:
        """Return a request for the engine's thread; RefusalError if the request is refused without that thread."""
        if key not in self._episodes:
            raise RefusalError(401, ENDED)
        if request.method != "POST" or request.path not in PATHS:
            raise RefusalError(404, f"there is no {request.path:.80}, expected {', '.join(PATHS)}")
        if episode.under_way > MAX_PENDING:
            raise RefusalError(429, f"{MAX_PENDING} requests of the episode wait for their answers")
        if episode.read == self._most:
            raise RefusalError(403, f"the episode has had its {self._most} requests, refused ones among them")
        episode.read += 1
        body = await _body_of(request)
        if key not in self._episodes:  # the episode has ended meanwhile
            raise RefusalError(401, ENDED)
        return PendingRequest(key, request.path, body, self._loop.create_future())

    async def _answered(self, pending: PendingRequest, episode: Requests) -> web.Response:
        episode.pending.add(pending)
        self._received.put((pending, False))
        try:
            return await pending.answer
        except asyncio.CancelledError:  # the program has closed the connection
            self._received.put((pending, True))
            raise
        finally:
            episode.pending.remove(pending)


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
