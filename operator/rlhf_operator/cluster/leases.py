"""The calls by which replicas elect a leader."""

from __future__ import annotations

from rlhf_operator.cluster.client import Client
from rlhf_operator.cluster.resources import LEASES
from rlhf_operator.snapshot import Document


class Leases:
    """Leases as JSON. Each call is one request: the election has its own patience."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def read(self, namespace: str, name: str) -> Document:
        return await self._client.call("GET", LEASES.path(namespace, name), kind=LEASES.plural, attempts=1)

    async def create(self, namespace: str, lease: Document) -> Document:
        path = LEASES.path(namespace)
        return await self._client.call("POST", path, kind=LEASES.plural, body=lease, attempts=1)

    async def replace(self, namespace: str, name: str, lease: Document) -> Document:
        path = LEASES.path(namespace, name)
        return await self._client.call("PUT", path, kind=LEASES.plural, body=lease, attempts=1)
