"""A bad way to the API server: a proxy between an operator and the server, with the faults that a test wants."""

import asyncio
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
from aiohttp import web

from tests.cluster.client import Cluster
from tests.cluster.credentials import kubeconfig

PASSED_ON = ("Authorization", "Content-Type", "Accept")
CUT = 0


class Fault(NamedTuple):
    """An HTTP code that the proxy answers itself, or CUT; `lost`: the server has done what was asked."""

    code: int
    retry_after: int = 0
    lost: bool = False


def no_faults(_: str, __: str) -> Fault | None:
    """All goes well."""
    return None


class Proxy:
    """Passes requests and watches on, but for what `plan` says of a method and a path."""

    def __init__(self, server: Cluster) -> None:
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.BaseTransport] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.plan: Callable[[str, str], Fault | None] = no_faults
        self.played: Counter[Fault] = Counter()
        self.requests_a_cut = 0
        """Requests, but for watches and Leases, after which all connections are cut; never if 0."""
        self._requests = 0
        self.port = 0

    def kubeconfig(self, folder: Path) -> Path:
        """The administrator's way through this proxy."""
        token = self._server.settings.tokens["admin"]
        path = folder / "proxy.kubeconfig"
        path.write_text(kubeconfig(f"http://127.0.0.1:{self.port}", token))
        return path

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._started.set()
        self._loop.run_forever()

    async def _listen(self) -> None:
        trust = ssl.create_default_context(cafile=str(self._server.folder / "pki/ca.crt"))
        connector = aiohttp.TCPConnector(ssl=trust, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        application = web.Application(client_max_size=2**26)
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    async def _close(self) -> None:
        self._abort()
        await self._runner.cleanup()
        await self._session.close()

    def _abort(self) -> None:
        for transport in self._open:
            if isinstance(transport, asyncio.Transport):
                transport.abort()
        self._open.clear()

    def _cut_in_its_turn(self, request: web.Request) -> None:
        # By requests, not by seconds: on a slow machine seconds would leave no connection long enough for anything.
        if self.requests_a_cut and "watch" not in request.query and "/leases" not in request.path:
            self._requests += 1
            if self._requests % self.requests_a_cut == 0:
                self._abort()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        self._open.add(transport)
        fault = self.plan(request.method, request.path)
        if fault is not None:
            self.played[fault] += 1
        self._cut_in_its_turn(request)
        try:
            if fault is None or fault.lost:
                return await self._pass_on(request, fault)
            if fault.code == CUT:
                transport.abort()
            headers = {"Retry-After": str(fault.retry_after)} if fault.retry_after else {}
            return web.json_response({"kind": "Status", "message": "played"}, status=fault.code or 502, headers=headers)
        finally:
            self._open.discard(transport)

    async def _pass_on(self, request: web.Request, fault: Fault | None) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        url = self._server.settings.url + request.path_qs
        # Without a body there is no type of one: the API server looks at it.
        body = await request.read() or None
        async with self._session.request(request.method, url, headers=headers, data=body) as answer:
            if fault is not None:
                await answer.read()
                if request.transport is not None:
                    request.transport.abort()
                return web.Response(status=502)
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


@contextmanager
def proxy(server: Cluster) -> Iterator[Proxy]:
    """One that works."""
    made = Proxy(server)
    made.start()
    try:
        yield made
    finally:
        made.stop()
