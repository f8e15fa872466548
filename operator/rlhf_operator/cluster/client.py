"""JSON client of the API server: the Kubernetes client with renewed credentials, retries and a limit of requests."""

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import ApiClient, ApiException, Configuration
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.utils import Backoff, on_retry_after_error

from rlhf_operator.actions import Manifest
from rlhf_operator.cluster import raw
from rlhf_operator.cluster.raw import Listing
from rlhf_operator.cluster.resources import JOBS, Resource
from rlhf_operator.snapshot import Document
from rlhf_operator.times import ServerClock

MAX_REQUESTS: Final = 16
MAX_ATTEMPTS: Final = 5
REQUEST_SECONDS: Final = 20.0
# aiohttp's own limit of a request, `total`, can swallow the cancellation of a task that comes at the same moment.
TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=5)
MAX_PAUSE: Final = 30.0  # seconds between two tries of a request, before jitter; also the limit of Retry-After
UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, GONE, INVALID, BUSY = 401, 403, 404, 409, 410, 422, 429


class ApiError(Exception):
    """The API server answered with an error, or (status 0) not at all."""

    def __init__(self, status: int, message: str, headers: Any = None) -> None:
        self.status, self.headers = status, headers
        super().__init__(message)

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (0, UNAUTHORIZED, BUSY) or self.status >= 500


@contextmanager
def tolerate(*codes: int) -> Iterator[None]:
    """Suppress an ApiError with one of these HTTP codes."""
    try:
        yield
    except ApiError as error:
        if error.status not in codes:
            raise


class NotLeadingError(Exception):
    """This replica is not the leader, so it may not write."""


class NoClusterError(Exception):
    """The API server's address or credentials are unknown, or its cluster has no RLHFJobs."""


async def _configuration(kubeconfig: Path | None) -> Configuration:
    configuration: Configuration = type.__call__(Configuration)
    configuration.client_session_kwargs = {"trust_env": False}
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


class Client:
    """Client of the API server for one process."""

    count: Callable[[str, str, int], None] | None = None
    """Function called after every request with (method, plural of the kind, HTTP code or 0 without an answer)."""

    def __init__(self, kubeconfig: Path | None, configuration: Configuration) -> None:
        self.clock = ServerClock()
        self._kubeconfig = kubeconfig
        self._slots = asyncio.Semaphore(MAX_REQUESTS)
        self._api = self._api_before = ApiClient(configuration)
        self._renewal = asyncio.Lock()

    @classmethod
    async def connect(cls, kubeconfig: Path | None) -> Self:
        """Connect by `kubeconfig`, else by the pod's service account or the default file; raises NoClusterError."""
        return cls(kubeconfig, await _configuration(kubeconfig))

    async def close(self) -> None:
        for api in (self._api, self._api_before):
            await api.close()  # type: ignore[no-untyped-call]

    async def renew_credentials(self) -> Configuration:
        """Read the credentials again, because they expire, and return them; requests under way keep the old ones."""
        configuration = await _configuration(self._kubeconfig)
        old, self._api_before, self._api = self._api_before, self._api, ApiClient(configuration)
        if old is not self._api_before:
            await old.close()  # type: ignore[no-untyped-call]
        return configuration

    async def find(self, path: str, kind: str, attempts: int = MAX_ATTEMPTS) -> Document | None:
        """Return the answer to a GET request; None if the path does not exist (404)."""
        with tolerate(NOT_FOUND):
            return await self.call("GET", path, kind=kind, attempts=attempts)
        return None

    async def get(self, resource: Resource, namespace: str, name: str) -> Document | None:
        """Return an object; None if it does not exist."""
        return await self.find(resource.path(namespace, name), resource.plural)

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        selector: str = "",
        fields: str = "",
        slim: Callable[[Document], Document] | None = None,
    ) -> Listing:
        """Return all objects of a kind in one consistent state, read in pages; only jobs keep their managedFields.

        selector: label selector; fields: field selector; slim: applied to each object as soon as its page is read.
        """
        path, items = resource.path(namespace), list[Document]()
        given = {"limit": "100", "labelSelector": selector, "fieldSelector": fields}
        query = {name: value for name, value in given.items() if value}
        while True:
            try:
                page = await self.call("GET", path, kind=resource.plural, query=query)
            except ApiError as error:
                if error.status != GONE or "continue" not in query:
                    raise
                # The server no longer has the state of the earlier pages, so the list begins anew.
                items.clear()
                del query["continue"], query["limit"]
                continue
            if "items" not in page:
                raise ApiError(0, f"GET {path}: the answer is no list")
            for item in page["items"] or []:
                if resource != JOBS:  # a job's managedFields show what an upgrade has dropped
                    item.get("metadata", {}).pop("managedFields", None)
                items.append(slim(item) if slim else item)
            if not (rest := raw.text(page, "metadata", "continue")):
                return Listing(items=tuple(items), version=int(raw.text(page, "metadata", "resourceVersion") or 0))
            query["continue"] = rest

    async def call(
        self,
        method: str,
        path: str,
        *,
        kind: str,
        query: dict[str, str] | None = None,
        body: Manifest | None = None,
        may: Callable[[], bool] | None = None,
        attempts: int = MAX_ATTEMPTS,
    ) -> Document:
        """Send a request and return the server's answer.

        Passing errors (no answer, 401, 429, 5xx) are retried. may: called before each try; if it
        returns False, NotLeadingError is raised.
        """

        async def attempt() -> Document:
            if may is not None and not may():
                raise NotLeadingError
            status, api = 0, self._api
            try:
                status, answer = await self._request(method, path, query, body)
            except ApiError as error:
                status = error.status
                if status == UNAUTHORIZED:
                    await self._renew(api)
                raise
            finally:
                if self.count:
                    self.count(method, kind, status)
            return answer

        async def pause(seconds: float) -> None:
            # With jitter: clients that got the same Retry-After must not return at the same moment.
            await asyncio.sleep(min(seconds, MAX_PAUSE) * random.uniform(1.0, 1.5))

        def is_passing(error: Exception) -> bool:
            return isinstance(error, ApiError) and error.passing

        backoff = Backoff(steps=attempts, duration=0.4, factor=2.0)
        return await on_retry_after_error(backoff, is_passing, attempt, pause)

    async def _renew(self, refused: object) -> None:
        async with self._renewal:
            if self._api is refused:  # no other refused request has renewed the credentials yet
                await self.renew_credentials()

    async def _request(
        self, method: str, path: str, query: dict[str, str] | None, body: Manifest | None
    ) -> tuple[int, Document]:
        """Send a request once; return (HTTP code, answer). Raises ApiError, also if the answer is no JSON object."""
        where = f"{method} {path}"
        try:
            async with self._slots, asyncio.timeout(REQUEST_SECONDS):
                sent = time.monotonic()
                response = await DynamicClient(self._api).request(  # type: ignore[no-untyped-call]
                    method,
                    path,
                    body=body,
                    query_params=list((query or {}).items()),
                    content_type="application/merge-patch+json" if method == "PATCH" else "application/json",
                    serialize=False,
                    _request_timeout=TIMEOUT,
                )
                self.clock.observe(response.headers.get("Date"), sent)
                text = await response.text(errors="replace")
        except ApiException as error:
            answer = _parsed(error.body)
            reason = (error.body or "")[:500] if answer is None else answer.get("message")
            sentence = f"{where}: {error.status}: {reason or 'no reason given'}"
            raise ApiError(error.status, sentence, error.headers) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(0, f"{where}: {str(error) or type(error).__name__}") from None
        if (answer := _parsed(text)) is None:
            raise ApiError(0, f"{where}: an answer that cannot be read: {text[:500]}", response.headers)
        return response.status, answer


def _parsed(text: str | None) -> Document | None:
    """Return a JSON object; None if the text is anything else, or nested too deeply to be read."""
    try:
        value: Any = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
