"""HTTP servers: /metrics, over TLS if there is a certificate; on another port the probes, without TLS."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rlhf_api.problems import Problem, SpecError

logger = logging.getLogger(__name__)

OPERATOR_METRICS_PORT: Final = 9090
PROBES_PORT: Final = 8081
RENEW_SECONDS: Final = 60.0  # between two readings of the certificate, which is renewed in place


class Tls:
    """TLS context with tls.crt and tls.key of a folder, as in a Secret of type kubernetes.io/tls."""

    def __init__(self, folder: Path, *, asks_clients: bool = False) -> None:
        """Read the files; raises SpecError. asks_clients: clients must show a certificate by an authority in ca.crt."""
        self._folder, self._asks_clients = folder, asks_clients
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        if asks_clients:
            self.context.verify_mode = ssl.CERT_REQUIRED
        try:
            self.load()
        except OSError as error:
            names = "tls.crt, tls.key and ca.crt" if asks_clients else "tls.crt and tls.key"
            raise SpecError([Problem(str(folder), f"has no {names} for TLS of the metrics: {error}")]) from None

    def load(self) -> None:
        """Read the files anew for new connections. Raises OSError if one is missing, or key and certificate differ."""
        self.context.load_cert_chain(self._folder / "tls.crt", self._folder / "tls.key")
        if self._asks_clients:
            self.context.load_verify_locations(self._folder / "ca.crt")


class Ports(NamedTuple):
    """Ports on which the operator listens, on all addresses."""

    metrics: int = OPERATOR_METRICS_PORT
    probes: int = PROBES_PORT
    tls: Tls | None = None


class Server:
    """Server of /metrics, /healthz and /readyz, on the reconciler's event loop: a stuck loop fails the probes."""

    def __init__(
        self, registry: CollectorRegistry, *, unhealthy: Callable[[], str | None], unready: Callable[[], str | None]
    ) -> None:

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        self._metrics = _runner(web.get("/metrics", metrics))
        self._probes = _runner(_probe("/healthz", unhealthy), _probe("/readyz", unready))
        self._renewal: asyncio.Task[None] | None = None

    async def start(self, ports: Ports) -> None:
        """Begin to serve. Raises OSError if a port is taken."""
        for runner in (self._metrics, self._probes):
            await runner.setup()
        context = ports.tls.context if ports.tls else None
        await web.TCPSite(self._metrics, port=ports.metrics, ssl_context=context).start()
        await web.TCPSite(self._probes, port=ports.probes).start()
        if ports.tls:
            self._renewal = asyncio.create_task(_renew(ports.tls))

    async def stop(self) -> None:
        if self._renewal:
            self._renewal.cancel()
        for runner in (self._metrics, self._probes):
            await runner.cleanup()


async def _renew(tls: Tls) -> None:
    while True:
        await asyncio.sleep(RENEW_SECONDS)
        try:
            tls.load()
        except OSError as error:
            logger.warning("the certificate of the metrics cannot be read anew: %s", error)


def _runner(*routes: web.RouteDef) -> web.AppRunner:
    application = web.Application()
    application.router.add_routes(routes)
    return web.AppRunner(application, access_log=None)


def _probe(path: str, find_problem: Callable[[], str | None]) -> web.RouteDef:
    async def answer(_: web.Request) -> web.Response:
        problem = find_problem()
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")

    return web.get(path, answer)
