"""Calls to the API server as JSON: who we are, retries, at most so many at once."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import Configuration

from rlhf_operator.actions import Manifest
from rlhf_operator.cluster.resources import Resource
from rlhf_operator.snapshot import Document

logger = logging.getLogger(__name__)

AT_ONCE: Final = 16
ATTEMPTS: Final = 5
TIMEOUT: Final = aiohttp.ClientTimeout(total=20, sock_connect=5)
LONGEST_PAUSE: Final = 30.0
"""Seconds; a server that asks for more is asked again by the next pass."""
PAGE: Final = 100
MERGE_PATCH: Final = "application/merge-patch+json"
UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, GONE, INVALID, BUSY = 401, 403, 404, 409, 410, 422, 429


class ApiError(Exception):
    """The API server answered with an error, or (status 0) not at all."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)

    @property
    def passing(self) -> bool:
        """Whether the same request may be answered otherwise in a while."""
        return _passing(self.status)


class NotLeadingError(Exception):
    """This replica may not write any more."""


class NoClusterError(Exception):
    """It is not known where the API server is, or who we are."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All objects of a list, and the version of the server's state that it shows."""

    items: tuple[Document, ...]
    version: int


Count = Callable[[str, str, int], None]
"""Told of every request: method, plural of the kind, HTTP code (0: no answer)."""


async def _configuration(kubeconfig: Path | None) -> Configuration:
    configuration: Configuration = type.__call__(Configuration)
    try:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            kubernetes_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            await kubernetes_config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=str(kubeconfig) if kubeconfig else None,
                client_configuration=configuration,
                persist_config=False,
            )
    except (kubernetes_config.ConfigException, OSError) as error:
        raise NoClusterError(f"no way to the API server: {error}") from None
    return configuration


def _ssl_context(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Client:
    """One process' calls to the API server."""

    count: Count | None = None
    """Told of every request from now on."""

    def __init__(self, kubeconfig: Path | None, configuration: Configuration) -> None:
        self._kubeconfig = kubeconfig
        self._session = aiohttp.ClientSession(
            timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=AT_ONCE + 4), json_serialize=json.dumps
        )
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._use(configuration)

    @classmethod
    async def connect(cls, kubeconfig: Path | None) -> Self:
        """As the pod's service account, or by a kubeconfig. NoClusterError where there is neither."""
        return cls(kubeconfig, await _configuration(kubeconfig))

    async def close(self) -> None:
        await self._session.close()

    async def credentials(self) -> tuple[Configuration, str | None]:
        """The configuration and the Authorization header, as they are now."""
        return self._configuration, await self._authorization()

    async def renew_credentials(self) -> None:
        """Read them again where they came from: tokens end."""
        self._use(await _configuration(self._kubeconfig))

    async def read(self, path: str) -> Document:
        """Any GET."""
        return await self.call("GET", path, kind=path.strip("/").split("/")[0])

    async def get(self, resource: Resource, namespace: str, name: str) -> Document:
        return await self.call("GET", resource.path(namespace, name), kind=resource.plural)

    async def list(self, resource: Resource, namespace: str | None, selector: str = "") -> Listing:
        """All objects, in pages; what the server says now."""
        items: list[Document] = []
        query = {"limit": str(PAGE), **({"labelSelector": selector} if selector else {})}
        while True:
            try:
                page = await self.call("GET", resource.path(namespace), kind=resource.plural, query=query)
            except ApiError as error:
                if error.status != GONE or "continue" not in query:
                    raise
                # The state that the pages showed is too old by now.
                items.clear()
                del query["continue"], query["limit"]
                continue
            if "items" not in page:
                raise ApiError(0, f"GET {resource.path(namespace)}: the answer is no list")
            for item in page["items"] or []:
                item.get("metadata", {}).pop("managedFields", None)  # half of its bulk, and nobody reads it
                items.append(item)
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return Listing(items=tuple(items), version=int(metadata.get("resourceVersion") or 0))
            query["continue"] = metadata["continue"]

    async def call(
        self,
        method: str,
        path: str,
        *,
        kind: str,
        query: dict[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = "application/json",
        may: Callable[[], bool] | None = None,
        attempts: int = ATTEMPTS,
    ) -> Document:
        """The server's answer. 429, 5xx and silence are tried again; ApiError for the rest and after the last attempt.

        may: asked before every attempt; NotLeadingError when it says no.
        """
        for attempt in range(1, attempts + 1):
            if may is not None and not may():
                raise NotLeadingError
            status, answer, retry_after = await self._once(method, path, query, body, content_type)
            if self.count:
                self.count(method, kind, status)
            if 0 < status < 400:
                return answer
            if not _passing(status) or attempt == attempts:
                break
            if status == UNAUTHORIZED:
                await self.renew_credentials()
            # Spread, so that all who were told to wait do not come back together.
            await asyncio.sleep((retry_after or min(0.2 * 2**attempt, LONGEST_PAUSE)) * random.uniform(1.0, 1.5))
        raise ApiError(status, _sentence(method, path, status, answer))

    async def _once(
        self, method: str, path: str, query: dict[str, str] | None, body: Manifest | None, content_type: str
    ) -> tuple[int, Document, float]:
        """(HTTP code or 0, answer, seconds that the server asks to wait)."""
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        if (authorization := await self._authorization()) is not None:
            headers["Authorization"] = authorization
        data = None if body is None else json.dumps(body)
        try:
            async with (
                self._slots,
                self._session.request(
                    method, self._host + path, params=query, data=data, headers=headers, ssl=self._ssl
                ) as response,
            ):
                status, text = response.status, await response.text(errors="replace")
                if (answer := _parsed(text)) is not None:
                    return status, answer, _seconds(response.headers.get("Retry-After"))
                if status < 400:
                    return 0, {"message": f"an answer that cannot be read: {text[:500]}"}, 0.0
                return status, {"message": text[:500]}, _seconds(response.headers.get("Retry-After"))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return 0, {"message": str(error) or type(error).__name__}, 0.0

    async def _authorization(self) -> str | None:
        token = await self._configuration.get_api_key_with_prefix("BearerToken")
        return str(token) if token else None

    def _use(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._host = str(configuration.host).rstrip("/")
        self._ssl = _ssl_context(configuration)


def _passing(status: int) -> bool:
    """Whether the same request may be answered otherwise in a moment."""
    return status in (0, UNAUTHORIZED, BUSY) or status >= 500


def _parsed(text: str) -> Document | None:
    """A JSON object; None for anything else, and for one that is nested too deep to be read."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _seconds(header: str | None) -> float:
    return min(float(header), LONGEST_PAUSE) if header and header.isdigit() else 0.0


def _sentence(method: str, path: str, status: int, answer: Document) -> str:
    reason = answer.get("message") or "no reason given"
    return f"{method} {path}: {f'{status}: ' if status else ''}{reason}"
