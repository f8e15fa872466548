"""Reconciler, which runs in the leader only: events become keys of a queue, and each key is one reconcile pass."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from rlhf_operator.actions import Create, Plan, ReadLive
from rlhf_operator.cluster.apply import Applier, RefusedError, StaleError
from rlhf_operator.cluster.cache import Key
from rlhf_operator.cluster.client import ApiError, NotLeadingError
from rlhf_operator.cluster.observe import Observer
from rlhf_operator.metrics import Result
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Refusal, Snapshot
from rlhf_operator.work_queue import WorkQueue

logger = logging.getLogger(__name__)

WORKERS: Final = 16
DECIDERS: Final = 4
"""Number of threads that run `decide`: the mapper takes up to 0.5 s, which would block the event loop."""
CALL_SECONDS: Final = 0.05
"""Seconds between two checks of which jobs in line may begin."""
CALL_AGAIN_SECONDS: Final = 1.0
"""Seconds until the next check if two checks in a row have called the same jobs."""
RESYNC_SECONDS: Final = 300.0
RELIST_DELAY_SECONDS: Final = 10.0
"""Seconds from a watch's reconnect until all is listed again: several watches often reconnect together."""
STUCK_SECONDS: Final = 600.0
MAX_POLL_INTERVALS: Final = 4
"""Most poll intervals between two readings of a head pod that does not answer; each try takes seconds."""

Decide = Callable[[Snapshot, datetime, Settings], Plan]


@dataclass(eq=False)
class Reconciler:
    """Reconciler of all jobs, at work while this replica leads."""

    decide: Decide
    observer: Observer
    applier: Applier
    reconciled: Callable[[Result, float], None]
    clock: Callable[[], datetime]
    leads: bool = False
    queue: WorkQueue[Key] = field(default_factory=WorkQueue)
    """Jobs that wait for a pass, with the number of failed passes of each job since its last successful one."""
    _polls: WorkQueue[Key] = field(default_factory=WorkQueue)
    _pauses: dict[Key, float] = field(default_factory=dict)
    _stale: set[Key] = field(default_factory=set)
    _refused: dict[Key, Refusal] = field(default_factory=dict)
    _reservation: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held while free capacity is read and the reservation is written."""
    _synced: bool = False
    _relist_requested: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._since = self.clock()

    def unready(self) -> str | None:
        """Return why this replica cannot work, in a sentence; None if it can."""
        return None if self._synced else "what is in the cluster has not been listed yet"

    def unhealthy(self) -> str | None:
        """Return why this process should be started again, in a sentence; None if it should not."""
        if (longest := self.queue.longest_busy()) is None or longest[1] < STUCK_SECONDS:
            return None
        (namespace, name), seconds = longest
        return f"a pass over {namespace}/{name} has taken {seconds:.0f} s"

    def enqueue(self, keys: Iterable[Key]) -> None:
        """Request a pass for each of these jobs, if this replica leads."""
        if self.leads:
            for key in keys:
                self.queue.add(key)

    def relist(self) -> None:
        """Request a new list of all objects, because a watch that reconnected may have missed deletions."""
        self._relist_requested.set()

    async def sync(self) -> None:
        """List all objects into the cache, and try again until that has worked."""
        pause = 0.5
        while not await self._has_listed():
            await asyncio.sleep(pause)
            pause = min(2 * pause, 30.0)
        self._synced = True

    async def _has_listed(self) -> bool:
        try:
            await self.observer.sync()
        except ApiError as error:
            logger.warning("cannot list what is in the cluster: %s", error)
        except Exception:
            # A bug that one object triggers must not end the operator.
            logger.exception("what is in the cluster was not understood")
        else:
            return True
        return False

    async def lead(self) -> None:
        """Reconcile all jobs until cancelled."""
        self._since = self.clock()
        await self.sync()
        self.leads = True
        self.enqueue(self.observer.keys())
        executor = ThreadPoolExecutor(DECIDERS, thread_name_prefix="decide")
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(WORKERS):
                    group.create_task(self._work(executor))
                    group.create_task(self._poll_heads())
                group.create_task(self._resync())
                group.create_task(self._call_the_next())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed  # the caller looks at the error's type
        finally:
            self.leads = False
            self.queue.close()
            self._polls.close()
            executor.shutdown(wait=False, cancel_futures=True)

    async def _resync(self) -> None:
        """List all objects every few minutes, and soon after a watch has reconnected, to make up for missed events."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RESYNC_SECONDS * random.uniform(0.9, 1.1)):
                    await self._relist_requested.wait()
                    await asyncio.sleep(RELIST_DELAY_SECONDS)
            self._relist_requested.clear()
            if not await self._has_listed():
                self._relist_requested.set()
            self.enqueue(self.observer.keys())

    async def _call_the_next(self) -> None:
        """Request passes for the jobs whose turn it may be, if the line has moved."""
        before: list[Key] = []
        while True:
            try:
                called = self.observer.next_in_line()
            except Exception:
                # A bug must not end the operator; the resync wakes all jobs.
                logger.exception("the next jobs in line were not found")
                called = []
            self.enqueue(called)
            # The pods of a large job end one after the other: the same jobs are not called once for each pod.
            await asyncio.sleep(CALL_AGAIN_SECONDS if called and called == before else CALL_SECONDS)
            before = called or before

    async def _work(self, executor: ThreadPoolExecutor) -> None:
        while True:
            key = await self.queue.get()
            begun = time.monotonic()
            try:
                self.reconciled(await self._reconcile(key, executor), time.monotonic() - begun)
            finally:
                self.queue.done(key)

    async def _reconcile(self, key: Key, executor: ThreadPoolExecutor) -> Result:
        """Do one pass over a job; log an error, and requeue the job with backoff."""
        if self.observer.head(key) is not None and not self._polls.knows(key):
            self._polls.add(key)  # passes may fail while the trainer goes on, as where a sandbox is refused
        try:
            again = await self._observe_decide_apply(key, executor)
        except StaleError:
            self._stale.add(key)
            self.queue.retry(key)
            return "stale"
        except NotLeadingError:
            return "stale"
        except (ApiError, RefusedError) as error:
            if isinstance(error, RefusedError):
                self._refused[key] = error.refusal
            self._stale.add(key)
            logger.warning("%s/%s: %s; again in %.1f s", *key, error, self._failed(key, error))
            return "error"
        except Exception as error:
            # A bug that one job triggers must not stop the others.
            logger.exception("%s/%s: the pass failed; again in %.1f s", *key, self._failed(key, error))
            return "error"
        self.queue.succeeded(key)
        self.observer.failing.pop(key, None)
        self.queue.add_after(key, again)
        if self._refused.pop(key, None):
            self.queue.add(key)  # the status still reports the refusal
        return "done"

    def _failed(self, key: Key, error: Exception) -> float:
        """Requeue a job whose pass failed; return the seconds until its next pass."""
        # An API server that does not answer is not the job's fault.
        if not (isinstance(error, ApiError) and error.passing):
            self.observer.failing.setdefault(key, time.monotonic())
        return self.queue.retry(key)

    async def _observe_decide_apply(self, key: Key, executor: ThreadPoolExecutor) -> float | None:
        """Do one pass over a job; return the seconds until the next pass, None if only an event can change anything."""
        fresh, alone = key in self._stale, False
        while True:
            async with self._reservation if alone else nullcontext():
                snapshot = await self.observer.observe(key, fresh=fresh, since=self._since)
                self._stale.discard(key)
                if snapshot is None:
                    return None
                snapshot = replace(snapshot, refused=self._refused.get(key), alone=alone)
                loop = asyncio.get_running_loop()
                plan = await loop.run_in_executor(executor, self.decide, snapshot, self.clock(), self.observer.settings)
                look = next((action for action in plan.actions if isinstance(action, ReadLive)), None)
                if look is None:
                    await self.applier.write_status(snapshot, plan)
                    break
            if fresh and (alone or not look.alone):
                raise RuntimeError(f"a live read was requested again: {look.why}")
            fresh, alone = True, alone or look.alone
        await self.applier.act(snapshot, plan)
        # A new object is in the cache already, so its watch event requests no pass of this job; Jobs are not watched.
        if any(isinstance(action, Create) and action.manifest.get("kind") != "Job" for action in plan.actions):
            self.queue.add(key)
        return plan.requeue_after

    async def _poll_heads(self) -> None:
        while True:
            key = await self._polls.get()
            try:
                await self._poll_head(key)
            except Exception:
                # What one pod answers must not stop the others.
                logger.exception("%s/%s: its head pod's answer was not understood", *key)
            finally:
                self._polls.done(key)

    async def _poll_head(self, key: Key) -> None:
        """Read a head pod's progress, and schedule the next reading; the pause doubles while the pod is silent."""
        if (head := self.observer.head(key)) is None:
            self._pauses.pop(key, None)
            return
        uid, pod = head
        interval = self.observer.settings.status_interval_seconds
        before = self.observer.heartbeats.last(uid, pod.attempt)
        pause = min(2 * self._pauses.get(key, interval), MAX_POLL_INTERVALS * interval)
        try:
            if await self.observer.heartbeats.read(uid, pod):
                self.enqueue([key])
            if self.observer.heartbeats.last(uid, pod.attempt) is not before:
                pause = interval
        finally:
            self._pauses[key] = pause
            self._polls.add_after(key, pause)
