"""Observer of RLHFJobs through the API server, for benchmarks/operators.py."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from tests.cluster.client import Cluster

NAMESPACE = "bench"
GROUP_PATH = "/apis/rlhf.hybridflow.io/v1alpha1"
JOBS = f"{GROUP_PATH}/namespaces/{NAMESPACE}/rlhfjobs"
RAYJOBS = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayjobs"
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
REQUEST = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
WRITES = ("PATCH", "PUT", "APPLY")


class Watched:
    """Times at which jobs were first seen as reconciled, by watches in threads of this process."""

    def __init__(self, server: Cluster) -> None:
        self._server = server
        self._ends = threading.Event()
        self.told: dict[str, float] = {}
        self.made: dict[str, float] = {}
        self.trouble = ""
        self._threads = [
            threading.Thread(target=self._keep, args=args, daemon=True)
            for args in ((JOBS, "application/json", self._job), (RAYJOBS, METADATA_ONLY, self._rayjob))
        ]

    def reconciled(self) -> dict[str, float]:
        """Name of a job -> when its RayJob was there and its status told of it."""
        return {job: max(at, self.made[job]) for job, at in list(self.told.items()) if job in self.made}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watches meanwhile."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._ends.set()

    def _job(self, document: Mapping[str, Any]) -> None:
        if document.get("status", {}).get("attempt"):
            self.told.setdefault(document["metadata"]["name"], time.monotonic())

    def _rayjob(self, document: Mapping[str, Any]) -> None:
        owners = document["metadata"].get("ownerReferences") or [{"name": ""}]
        self.made.setdefault(owners[0]["name"], time.monotonic())

    def _keep(self, path: str, accept: str, see: Callable[[Mapping[str, Any]], None]) -> None:
        while not self._ends.is_set():
            try:
                self._watch(path, accept, see)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.trouble = f"watch of {path}: {error!r}"
                time.sleep(0.2)

    def _watch(self, path: str, accept: str, see: Callable[[Mapping[str, Any]], None]) -> None:
        settings = self._server.settings
        trust = ssl.create_default_context(cafile=str(self._server.folder / "pki/ca.crt"))
        connection = http.client.HTTPSConnection(settings.ip, settings.ports["server"], timeout=600, context=trust)
        headers = {"Authorization": f"Bearer {settings.tokens['admin']}", "Accept": accept}
        # Without a resourceVersion a watch begins with all objects that there are.
        connection.request("GET", f"{path}?watch=1", headers=headers)
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise ValueError(f"{answer.status} {answer.read()[:500]!r}")
        for line in answer:
            event = json.loads(line)
            if event["type"] in ("ADDED", "MODIFIED"):
                see(event["object"])
            if self._ends.is_set():
                break
        connection.close()


@dataclass(frozen=True)
class Requests:
    """The API server's own count of writes so far."""

    status: float
    metadata: float
    conflicts: float
    rayjob_posts: float

    @classmethod
    def now(cls, server: Cluster) -> Requests:
        """Read from its /metrics."""
        status = metadata = conflicts = posts = 0.0
        for labels_text, number in REQUEST.findall(str(server.expect("GET", "/metrics"))):
            labels, count = dict(LABEL.findall(labels_text)), float(number)
            if labels["resource"] == "rayjobs" and labels["verb"] == "POST":
                posts += count
            if labels["resource"] != "rlhfjobs" or labels["verb"] not in WRITES:
                continue
            if labels["code"] == "409":
                conflicts += count
            elif labels["subresource"] == "status":
                status += count
            else:
                metadata += count
        return cls(status, metadata, conflicts, posts)

    def since(self, earlier: Requests) -> Requests:
        return Requests(*(a - b for a, b in zip(asdict(self).values(), asdict(earlier).values(), strict=True)))
