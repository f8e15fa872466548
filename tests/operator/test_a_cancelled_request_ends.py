"""A request that is cancelled as its time runs out is cancelled: else a replica without its Lease would never end.

aiohttp's own time limit reports a timeout to the task in that case, and the task goes on.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rlhf_operator.cluster import client, heartbeats
from rlhf_operator.cluster.client import Client
from rlhf_operator.cluster.heartbeats import Heartbeats
from rlhf_operator.snapshot import ObservedPod
from tests.cluster.credentials import kubeconfig

SECONDS = 1.0
NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
POD = ObservedPod(name="head", uid="p", attempt=2, role="controller", created=NOW, ip="127.0.0.1", phase="Running")


def is_cancelled_as_time_runs_out(request: Callable[[int], Coroutine[Any, Any, object]]) -> bool:
    """Whether a request to a silent server is cancelled if its limit and the cancellation come in one turn of the loop.

    request: makes it, given the server's port.
    """

    async def test() -> bool:
        asked, silent = asyncio.Event(), asyncio.Event()

        async def wait(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await silent.wait()
            writer.close()

        async with await asyncio.start_server(wait, "127.0.0.1", 0) as server:
            task, loop = asyncio.create_task(request(server.sockets[0].getsockname()[1])), asyncio.get_running_loop()
            await asked.wait()
            loop.call_later(SECONDS, task.cancel)
            loop.call_soon(time.sleep, 1.1 * SECONDS)  # as a busy machine does; afterwards both are due
            await asyncio.wait({task})
            silent.set()
        return task.cancelled()

    return asyncio.run(test())


async def closing(resource: Client | Heartbeats, request: Awaitable[object]) -> object:
    try:
        return await request
    finally:
        await resource.close()


def test_a_reading_of_a_head_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "READ_SECONDS", SECONDS)

    async def read(port: int) -> object:
        found = Heartbeats(lambda: NOW, port=port)
        return await closing(found, found.read("u", POD))

    assert is_cancelled_as_time_runs_out(read)


def test_a_request_to_the_api_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(client, "REQUEST_SECONDS", SECONDS)

    async def call(port: int) -> object:
        (tmp_path / "kubeconfig").write_text(kubeconfig(f"http://127.0.0.1:{port}", "secret"))
        found = await Client.connect(tmp_path / "kubeconfig")
        return await closing(found, found.call("GET", "/api", kind="apis"))

    assert is_cancelled_as_time_runs_out(call)
