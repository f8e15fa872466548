"""Heartbeats: the trainer's progress, read from the head pods over HTTP, so that no pod needs credentials."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import aiohttp

from rlhf_operator import names
from rlhf_operator.cluster import parse, raw
from rlhf_operator.snapshot import Heartbeat, ObservedPod

READ_SECONDS: Final = 3.0
MAX_BYTES: Final = 2**20
MAX_PARTS: Final = 5_000  # lists and objects


def parsed(body: bytes) -> Any:
    """Return the JSON of a head pod's answer. Raises ValueError if it is no JSON or has too many lists and objects.

    Deep nesting could crash the parser: main lifts the recursion limit, and nobody checks what a user's pod answers.
    """
    if body.count(b"[") + body.count(b"{") > MAX_PARTS:
        raise ValueError("too many parts")
    return json.loads(body)


class Heartbeats:
    """Latest heartbeat of each job, as its head pod answered."""

    def __init__(self, clock: Callable[[], datetime], port: int = names.STATUS_PORT) -> None:
        self._clock, self._port = clock, port
        self._last: dict[str, Heartbeat] = {}
        connector, unlimited = aiohttp.TCPConnector(force_close=True), aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(timeout=unlimited, connector=connector)

    async def close(self) -> None:
        await self._session.close()

    def last(self, job_uid: str, attempt: int | None) -> Heartbeat | None:
        """Return the latest heartbeat of an attempt; None without one."""
        found = self._last.get(job_uid)
        return found if found is not None and found.attempt == attempt else None

    def forget_all_but(self, job_uids: set[str]) -> None:
        self._last = {uid: each for uid, each in self._last.items() if uid in job_uids}

    async def read(self, job_uid: str, pod: ObservedPod) -> bool:
        """Read a head pod's /status.json; return whether the heartbeat has changed. Unreadable answers are ignored."""
        answer = await self._ask(pod.ip)
        # With another jobUid the address has gone to another job's pod.
        if raw.number(answer, "attempt") != pod.attempt or raw.text(answer, "jobUid") not in ("", job_uid):
            return False
        code = raw.number(answer, "exitCode")
        heartbeat = Heartbeat(
            attempt=pod.attempt,
            received=self._clock(),
            status=parse.status(raw.at(answer, "status")),
            exit_code=code if code is not None and 0 <= code <= 255 else None,
            complete=raw.at(answer, "complete") is True,
        )
        before = self._last.get(job_uid)
        self._last[job_uid] = heartbeat
        return before is None or replace(before, received=heartbeat.received) != heartbeat

    async def _ask(self, ip: str) -> Any:
        host = f"[{ip}]" if ":" in ip else ip
        try:
            async with (
                asyncio.timeout(READ_SECONDS),
                self._session.get(f"http://{host}:{self._port}/status.json", allow_redirects=False) as response,
            ):
                if response.status != 200:
                    return None
                body = await response.content.read(MAX_BYTES)
                while not response.content.at_eof() and len(body) < MAX_BYTES:
                    body += await response.content.read(MAX_BYTES - len(body))
            return parsed(body)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None
