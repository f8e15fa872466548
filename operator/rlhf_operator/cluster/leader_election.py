"""Leader election by a Lease (coordination.k8s.io): one replica holds it, by compare-and-swap on its resource version.

Only this machine's monotonic clock counts. A waiting replica takes the Lease over once the Lease has not changed
for the duration stated in it. The holder stops writing earlier: at a deadline, counted from the sending of its last
renewal. The times in the Lease are for people. docs/adr/0011 says why the client library's own election is not used.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Thread
from typing import Any, Final, TypeVar

from rlhf_operator.cluster.client import CONFLICT, NOT_FOUND, ApiError, Client, tolerate
from rlhf_operator.cluster.resources import LEASES
from rlhf_operator.snapshot import Document
from rlhf_operator.times import timestamp

T = TypeVar("T")

logger = logging.getLogger(__name__)

DURATION_SECONDS: Final = 15.0  # time for which other replicas respect a claim
DEADLINE_SECONDS: Final = 10.0  # from the last renewal to the end of writing
PERIOD_SECONDS: Final = 2.0  # between two tries


class LostLeaseError(Exception):
    """This replica was the leader and has lost the Lease."""


class LoopThread:
    """Thread with an event loop, for coroutines that other event loops await; `close` ends it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread; return its result or raise its error. Cancellation is passed on to it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def close(self) -> None:
        """Stop the loop, and wait for the thread's end."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()


@dataclass(eq=False)
class Elector:
    """One replica as candidate or leader in the election; it takes over a Lease of its own `identity` at once."""

    client: Client
    name: str
    namespace: str
    identity: str
    clock: Callable[[], float] = time.monotonic
    thread: LoopThread | None = None
    """Thread that runs all requests, so that a busy event loop delays no renewal; `client` belongs to its loop."""
    _held: Document = field(default_factory=dict)
    _renewed: float = -math.inf
    _seen_version: str = ""
    _seen_at: float = -math.inf

    def may_write(self) -> bool:
        """Whether the replica surely still leads; checked before every write."""
        return self.clock() - self._renewed < DEADLINE_SECONDS

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Wait to be elected, run `lead`, and release the Lease; raises LostLeaseError, or the error of `lead`."""
        try:
            while not await self._aside(self._wins()):  # noqa: ASYNC110 no event tells of the Lease
                await asyncio.sleep(self._pause())
            logger.info("%s leads: it holds the Lease %s/%s", self.identity, self.namespace, self.name)
            await self._lead_while_renewed(lead)
        finally:
            await self._aside(self._release())

    async def _aside(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the elector's thread if it has one."""
        return await (self.thread.run(work) if self.thread else work)

    async def _lead_while_renewed(self, lead: Callable[[], Awaitable[None]]) -> None:
        renewing = asyncio.create_task(self._aside(self._keep()))
        leading = asyncio.ensure_future(lead())
        try:
            await asyncio.wait({leading, renewing}, return_when=asyncio.FIRST_COMPLETED)
            lost = renewing.exception() if renewing.done() else None
        finally:
            # In this order: `lead` still holds the Lease while it cleans up.
            for task in (leading, renewing):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if lost:
            raise lost
        leading.result()

    async def _wins(self) -> bool:
        try:
            async with asyncio.timeout(DEADLINE_SECONDS / 2):
                return await self._acquire()
        except Exception as error:  # noqa: BLE001 whatever goes wrong is tried again
            if not (isinstance(error, ApiError) and error.status == CONFLICT):  # another replica was faster
                self._report(error)
            return False

    async def _acquire(self) -> bool:
        lease = await self._read()
        spec = lease.get("spec") or {}
        version = str((lease.get("metadata") or {}).get("resourceVersion", ""))
        if version != self._seen_version:
            self._seen_version, self._seen_at = version, self.clock()
        if spec.get("holderIdentity") not in (None, "", self.identity):
            claimed = float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)
            if self.clock() - self._seen_at < claimed:
                return False
        await self._claim(lease)
        return True

    async def _keep(self) -> None:
        """Renew the Lease forever. Raises LostLeaseError if another replica holds it or renewal fails for too long."""
        while True:
            await asyncio.sleep(self._pause())
            left = self._renewed + DEADLINE_SECONDS - self.clock()
            try:
                async with asyncio.timeout(min(left, DEADLINE_SECONDS / 2)):
                    await self._renew()
            except LostLeaseError:
                self._renewed = -math.inf
                raise
            except Exception as error:  # noqa: BLE001 whatever goes wrong is tried again until the deadline
                self._report(error)
            if not self.may_write():
                raise LostLeaseError(f"the Lease {self.name} could not be renewed for {DEADLINE_SECONDS:g} s")

    async def _renew(self) -> None:
        with tolerate(NOT_FOUND, CONFLICT):
            await self._claim(self._held)
            return
        lease = await self._read()
        holder = (lease.get("spec") or {}).get("holderIdentity")
        if holder != self.identity:
            raise LostLeaseError(f"the Lease {self.name} is now held by {holder or 'nobody'}")
        # The earlier write of this replica succeeded: only its answer was lost.
        await self._claim(lease)

    async def _claim(self, lease: Document) -> None:
        """Write the Lease as held by this replica. lease: the current Lease; empty if there is none."""
        begun = self.clock()
        self._held = await self._send("PUT" if lease else "POST", self._written(lease, self.identity))
        self._renewed = begun

    async def _release(self) -> None:
        if not self.may_write():
            return
        # From here on this replica writes nothing, so the next one need not wait until the Lease runs out.
        self._renewed = -math.inf
        try:
            async with asyncio.timeout(PERIOD_SECONDS):
                await self._send("PUT", self._written(self._held, ""))
        except Exception as error:  # noqa: BLE001 the claim will run out by itself
            self._report(error)

    async def _read(self) -> Document:
        return await self.client.find(LEASES.path(self.namespace, self.name), LEASES.plural, attempts=1) or {}

    async def _send(self, method: str, lease: Document) -> Document:
        """Send one request without retries, because the election itself tries again."""
        path = LEASES.path(self.namespace, None if method == "POST" else self.name)
        return await self.client.call(method, path, kind=LEASES.plural, body=lease, attempts=1)

    def _written(self, lease: Document, holder: str) -> Document:
        old = lease.get("spec") or {}
        now = timestamp(datetime.now(UTC), "microseconds")
        changes = holder != "" and old.get("holderIdentity") != holder
        spec = {
            **old,
            "holderIdentity": holder,
            "leaseDurationSeconds": math.ceil(DURATION_SECONDS) if holder else 1,  # the API server refuses zero
            "renewTime": now,
            "acquireTime": now if changes else old.get("acquireTime", now),
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + int(changes and bool(lease)),
        }
        metadata = lease.get("metadata") or {"name": self.name, "namespace": self.namespace}
        return {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": spec}

    def _pause(self) -> float:
        """Return the seconds before the next try, with jitter so that the replicas' requests spread out."""
        return PERIOD_SECONDS * random.uniform(0.8, 1.2)

    def _report(self, error: Exception) -> None:
        logger.warning("the Lease %s/%s: %s", self.namespace, self.name, str(error) or type(error).__name__)
