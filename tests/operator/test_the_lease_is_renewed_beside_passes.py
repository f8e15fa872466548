"""The Lease is renewed in a thread of its own: whatever holds up the event loop of the passes delays no renewal."""

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from rlhf_operator.cluster import leader_election
from rlhf_operator.cluster.client import Client
from rlhf_operator.cluster.leader_election import Elector, LoopThread
from rlhf_operator.snapshot import Document

HANGS = 30.0
"""Seconds after which a test that hangs has failed."""


class Lease(Client):
    """A server with one Lease; it counts the writes, and says in which thread they came."""

    def __init__(self) -> None:
        self.lease: Document = {}
        self.writes = 0
        self.threads: set[str] = set()
        self.renewed = threading.Condition()

    async def find(self, *_: Any, **_given: Any) -> Document | None:
        return self.lease or None

    async def call(self, method: str, path: str, **given: Any) -> Document:
        assert (method, path.rpartition("/")[2]) in (("POST", "leases"), ("PUT", "name"))
        with self.renewed:
            self.lease, self.writes = given["body"], self.writes + 1
            self.threads.add(threading.current_thread().name)
            self.renewed.notify_all()
        return self.lease


def test_a_pass_that_blocks_delays_no_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_election, "PERIOD_SECONDS", 0.01)
    server = Lease()

    async def block() -> None:
        """A pass that holds the event loop until the Lease was renewed three times."""
        with server.renewed:
            assert server.renewed.wait_for(lambda: server.writes >= 4, HANGS), "nobody renews the Lease"

    async def main() -> None:
        thread = LoopThread("lease")
        await Elector(server, "name", "system", "me", thread=thread).run(block)
        await thread.close()

    asyncio.run(main())
    assert server.threads == {"lease"}
    assert server.lease["spec"]["holderIdentity"] == "", "it is released at the end"


def test_the_end_of_a_thread_waits_for_nothing_that_was_given_up() -> None:
    async def main() -> None:
        thread, begun, ended = LoopThread("aside"), threading.Event(), threading.Event()

        async def work() -> None:
            begun.set()
            try:
                await asyncio.sleep(HANGS)
            finally:
                ended.set()

        waiting = asyncio.create_task(thread.run(work()))
        await asyncio.to_thread(begun.wait, HANGS)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        assert await asyncio.to_thread(ended.wait, HANGS), "who gives up a coroutine ends it"
        await thread.close()

    asyncio.run(main())
