"""Program of the operator: reads settings; starts metrics, probes, leader election and kopf; ends them in order."""

import argparse
import asyncio
import itertools
import json
import logging
import os
import random
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import kopf

from rlhf_api.problems import SpecError
from rlhf_operator import names
from rlhf_operator.cluster.apply import Applier
from rlhf_operator.cluster.autoscalers import read_live_groups
from rlhf_operator.cluster.cache import Cache, Key
from rlhf_operator.cluster.client import ApiError, Client, NoClusterError
from rlhf_operator.cluster.discovery import Kind, discover
from rlhf_operator.cluster.events import EventRecorder
from rlhf_operator.cluster.heartbeats import Heartbeats
from rlhf_operator.cluster.leader_election import Elector, LoopThread, LostLeaseError
from rlhf_operator.cluster.observe import Observer
from rlhf_operator.metrics import OperatorMetrics
from rlhf_operator.reconcile.decide import decide
from rlhf_operator.reconciler import Reconciler
from rlhf_operator.server import OPERATOR_METRICS_PORT, PROBES_PORT, Ports, Server, Tls
from rlhf_operator.settings import Settings

logger = logging.getLogger(__name__)

COMPARE_OFFERS_SECONDS: Final = 30.0  # KubeRay may be installed later
MAX_DEPTH: Final = 100_000
"""Recursion limit of Python: the API server takes JSON of 10 000 levels, which must not stop the operator."""
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
PAUSE_SECONDS: Final = 2.0  # before the operator begins anew after an error


class RestartAttemptError(Exception):
    """The operator must begin anew: the cluster offers other kinds than at the start, or a watch failed."""


def main() -> None:
    """Run the program `rlhf-operator`."""
    sys.setrecursionlimit(MAX_DEPTH)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the operator; return 0 after SIGTERM, 1 for an error at the start, 2 for wrong settings.

    Once it has worked, it begins anew after an error, because Kubernetes restarts an ended container later and later.
    """
    options = _options(arguments)
    _log(options.log_format, options.log_level)
    try:
        settings = Settings.read(options.config)
        tls = Tls(options.tls, asks_clients=options.require_client_certificate) if options.tls else None
    except SpecError as error:
        for problem in error.problems:
            logger.error("%s", problem)
        return 2
    ports = Ports(metrics=options.port, probes=options.probes_port, tls=tls)
    pause = 0.0
    while True:
        try:
            asyncio.run(_operate(settings, options.kubeconfig, ports, pause))
        except (RestartAttemptError, LostLeaseError) as error:
            logger.warning("%s; the operator begins anew", error)
        except (NoClusterError, ApiError, OSError) as error:
            logger.error("%s", error)
            if not pause:
                return 1
        else:
            return 0
        pause = PAUSE_SECONDS


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rlhf-operator", description="Runs RLHFJobs on Kubernetes.")
    add = parser.add_argument
    add("--config", type=Path, required=True, help="file with the settings (YAML)")
    add("--kubeconfig", type=Path, help="kubeconfig of the cluster; default: the pod's own access")
    add("--port", type=int, default=OPERATOR_METRICS_PORT, help="port of /metrics (default %(default)s)")
    add("--probes-port", type=int, default=PROBES_PORT, help="port of /healthz and /readyz (default %(default)s)")
    add("--tls", type=Path, metavar="FOLDER", help="serve /metrics over TLS with tls.crt and tls.key of this folder")
    ours = "serve /metrics only to clients with a certificate by an authority in the folder's ca.crt"
    add("--require-client-certificate", action="store_true", help=ours)
    add("--log-level", choices=LOG_LEVELS, default="info", help="lowest level that is logged (default %(default)s)")
    add("--log-format", choices=("json", "text"), default="json", help="format of the log (default %(default)s)")
    found = parser.parse_args(arguments)
    if found.require_client_certificate and not found.tls:
        parser.error("--require-client-certificate needs --tls")
    return found


class _Json(logging.Formatter):
    """Formatter that writes a log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _log(form: str, level: str) -> None:
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(_Json() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # kopf logs every event that it passes on.
    logging.getLogger("kopf.objects").setLevel(max(logging.WARNING, logging.getLogger().level))


class _Operator:
    """One operator process: its cache, observer, reconciler, metrics and leader election, put together."""

    def __init__(
        self, settings: Settings, client: Client, heartbeats: Heartbeats, elector: Elector | None, pause: float
    ) -> None:
        self.settings, self.client, self.pause = settings, client, pause
        self.elector = elector  # without a Lease the only replica leads
        may_write = self.elector.may_write if self.elector else lambda: True
        self.cache = Cache()
        self.metrics = OperatorMetrics(
            version=version("rlhf-operator"),
            jobs=lambda: [entry.value for _, entry in self.cache.jobs],
            queue_depth=lambda: len(self.reconciler.queue),
            failed_passes=lambda: self.reconciler.queue.failures,
            leads=lambda: self.reconciler.leads and may_write(),  # a process that was paused notices a lost Lease late
            now=client.clock.now,
        )
        events = EventRecorder(client, may_write, client.clock.now)
        self.observer = Observer(client, self.cache, heartbeats, settings, self._enqueue)
        self.reconciler = Reconciler(
            decide,
            observer=self.observer,
            applier=Applier(client, self.cache, events, may_write, self._enqueue),
            reconciled=self.metrics.reconciled,
            clock=client.clock.now,
        )
        client.count = self.metrics.requested
        self._registry = kopf.OperatorRegistry()
        kopf.on.login(registry=self._registry)(self.log_in)
        kopf.on.startup(registry=self._registry)(self.start)
        kopf.on.cleanup(registry=self._registry)(self.end)
        self._stop = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self._failed: list[Exception] = []

    async def find_offer(self) -> None:
        """Find out what the cluster offers, as soon as the API server answers."""
        await asyncio.sleep(self.pause)
        while True:
            try:
                self.observer.offer = await discover(self.client, self.settings)
                await self.find_groups()
            except ApiError as error:
                if not error.passing:
                    raise
                logger.warning("%s", error)
            else:
                logger.info("besides RLHFJobs the cluster offers %s", self.observer.offer)
                return

    async def find_groups(self) -> None:
        """Find out which node groups autoscalers state, and plan on them from now on."""
        settings, unusable = await read_live_groups(self.client, self.settings)
        if self.observer.use_groups(settings, unusable):
            for each in unusable:
                logger.warning("%s", each)

    def _enqueue(self, keys: set[Key]) -> None:
        self.reconciler.enqueue(keys)

    async def log_in(self, **_given: Any) -> kopf.ConnectionInfo:
        """Return credentials to kopf, which calls this again when they have expired."""
        configuration = await self.client.renew_credentials()
        authorization = await configuration.get_api_key_with_prefix("BearerToken")
        scheme, _, token = (authorization or "").rpartition(" ")
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert or None,
            insecure=not configuration.verify_ssl,
            scheme=(scheme or "Bearer") if token else None,
            token=token or None,
            certificate_path=configuration.cert_file or None,
            private_key_path=configuration.key_file or None,
        )

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT, which kopf handles; raise the error that ended the operator earlier."""
        namespaces = self.settings.namespaces
        try:
            await kopf.operator(
                registry=self._registry,
                settings=_kopf_settings(),
                standalone=True,
                # By default kopf uses the user's name, which a user id assigned by the cluster does not have.
                identity=names.OPERATOR,  # type: ignore[arg-type]
                clusterwide=not namespaces,
                namespaces=namespaces,
                stop_flag=self._stop,
            )
        except Exception as error:
            ended = RestartAttemptError(f"a watch has failed: {str(error) or type(error).__name__}")
            raise (self._failed[0] if self._failed else ended) from error
        if self._failed:
            raise self._failed[0]

    async def start(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        """Find out which kinds to watch, and begin to reconcile; kopf calls this before it starts its watches."""
        await self._or_stop(self.find_offer())
        if not self._failed:
            for kind in self.observer.offer.kinds:
                self._watch(kind, settings)
            self._work = asyncio.create_task(self._or_stop(self._lead_and_compare_offers()))

    def _watch(self, kind: Kind, settings: kopf.OperatorSettings) -> None:
        """Register a handler that passes the events of a kind of object to the cache, and enqueues their jobs."""
        resource = kind.resource[:3]
        if kind.selector:
            settings.watching.label_selectors[resource] = kind.selector

        # With a low-level handler kopf writes neither finalizers nor annotations.
        @kopf.on.event(*resource, id=kind.name, registry=self._registry)
        async def saw(event: Any, **_: Any) -> None:
            change = self.cache.remove if event["type"] == "DELETED" else self.cache.put
            self.reconciler.enqueue(change(kind.name, event["object"]))
            # An object from a list has no type: at the start, and again after a watch was lost.
            if event["type"] is None:
                self.reconciler.relist()

    async def end(self, **_: Any) -> None:
        """Stop the reconciler, and release the Lease; kopf calls this when its watches have ended."""
        self._stop.set()  # else kopf's task that waits for this flag delays the exit after a signal by 5 s
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work})

    async def _or_stop(self, work: Coroutine[None, None, None]) -> None:
        """Await a coroutine; its error ends the operator, and is raised by `run`."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 it is raised by `run`
            self._failed.append(error)
            self._stop.set()

    async def _lead_and_compare_offers(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.lead())
                group.create_task(self.compare_offers())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def lead(self) -> None:
        """List all objects, wait to be elected, and reconcile."""
        await self.reconciler.sync()
        await (self.elector.run(self.reconciler.lead) if self.elector else self.reconciler.lead())

    async def compare_offers(self) -> None:
        """Raise RestartAttemptError once the cluster offers other kinds than at the start, such as those of KubeRay."""
        while True:
            await asyncio.sleep(COMPARE_OFFERS_SECONDS * random.uniform(0.9, 1.1))
            try:
                offer = await discover(self.client, self.settings)
                await self.find_groups()
            except (ApiError, NoClusterError) as error:
                logger.warning("cannot see what the cluster offers: %s", error)
                continue
            if offer != self.observer.offer:
                raise RestartAttemptError(f"the cluster offered {self.observer.offer} and now {offer}")


class _NoDifferences(kopf.MultiDiffBaseStorage):
    """Storage that copies nothing: kopf would copy each object twice to find differences, which nothing uses."""

    def build(self, **_: Any) -> Any:
        return {}


def _kopf_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: it writes nothing, scans for no other kinds, and waits long for the API server."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.persistence.diffbase_storage = _NoDifferences([])
    made.scanning.disabled = True
    made.networking.connect_timeout = 10
    made.networking.request_timeout = 60
    made.networking.enforce_retry_after = True
    # The operator waits up to an hour for an API server that is down.
    made.networking.error_backoffs = tuple(itertools.chain((1, 1, 2, 3, 5, 8), itertools.repeat(10, 360)))
    made.watching.inactivity_timeout = 70
    made.watching.chunk_size = 100
    made.queueing.idle_timeout = 1
    made.process.ultimate_exiting_timeout = 20
    return made


async def _elector(settings: Settings, kubeconfig: Path | None, stack: AsyncExitStack) -> Elector | None:
    """Return the elector, with a thread and a client of its own that `stack` ends; None if there is no election."""
    if settings.lease_namespace is None:
        return None
    thread = LoopThread("lease")
    stack.push_async_callback(thread.close)
    client = await thread.run(Client.connect(kubeconfig))
    stack.push_async_callback(lambda: thread.run(client.close()))
    # Outside of a cluster two processes may have one host name.
    identity = os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"
    return Elector(client, settings.lease_name, settings.lease_namespace, identity, thread=thread)


async def _operate(settings: Settings, kubeconfig: Path | None, ports: Ports, pause: float = 0.0) -> None:
    """Run the operator as `_Operator.run` does. pause: seconds before the first request."""
    async with AsyncExitStack() as stack:
        client = await Client.connect(kubeconfig)
        stack.push_async_callback(client.close)
        heartbeats = Heartbeats(client.clock.now)
        stack.push_async_callback(heartbeats.close)
        elector = await _elector(settings, kubeconfig, stack)
        operator = _Operator(settings, client, heartbeats, elector, pause)
        reconciler = operator.reconciler
        server = Server(operator.metrics.registry, unhealthy=reconciler.unhealthy, unready=reconciler.unready)
        stack.push_async_callback(server.stop)
        await server.start(ports)
        await operator.run()
