"""Two and more electors on one Lease in memory, in simulated time: the event loop jumps to its next timer.

The store keeps the API server's promise, a replace only with the latest resourceVersion; its failures are simulated.
"""

import asyncio
import contextlib
import functools
import itertools
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rlhf_operator.cluster.client import ApiError, Client
from rlhf_operator.cluster.leader_election import DEADLINE_SECONDS as DEADLINE
from rlhf_operator.cluster.leader_election import DURATION_SECONDS as DURATION
from rlhf_operator.cluster.leader_election import PERIOD_SECONDS as PERIOD
from rlhf_operator.cluster.leader_election import Elector, LostLeaseError
from rlhf_operator.snapshot import Document
from tests.each import each_case

NAMESPACE, NAME = "system", "rlhf-operator"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"


class JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: the time until the next timer passes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in simulated time."""

    def __init__(self) -> None:
        self.jumping = JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


def simulated(history: Callable[[SimulatedLoop], Coroutine[Any, Any, None]]) -> None:
    loop = SimulatedLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(history(loop))


def answered(status: int) -> ApiError:
    return ApiError(status, str(status))


class Store:
    """One Lease; what an elector sees of it goes through its own Wire."""

    def __init__(self) -> None:
        self.lease: Document | None = None
        self.version = 0
        self.writes = 0
        self.written = 0.0
        """When the latest write came."""

    def spec(self) -> Document:
        assert self.lease is not None
        spec: Document = self.lease["spec"]
        return spec

    def put(self, lease: Document) -> Document:
        self.version += 1
        self.writes += 1
        self.written = asyncio.get_running_loop().time()
        self.lease = {**lease, "metadata": {**lease["metadata"], "resourceVersion": str(self.version)}}
        return self.lease


class Wire(Client):
    """The calls of one elector; they take a moment, and can be made to fail."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.fails: Exception | None = None
        self.hangs = False
        self.loses_answers = False
        self.answers_after = 0.0

    async def call(self, method: str, path: str, **given: Any) -> Document:
        assert (given["kind"], given["attempts"]) == ("leases", 1)
        assert path == LEASES + ("" if method == "POST" else f"/{NAME}")
        await asyncio.sleep(3600 if self.hangs else 0.05)
        if self.fails:
            raise self.fails
        lease: Document | None = given.get("body")
        if self.store.lease is None and method != "POST":
            raise answered(404)
        if lease is None:
            return dict(self.store.lease or {})
        # Without a version the server replaces whatever stands there.
        version = lease["metadata"].get("resourceVersion")
        if self.store.lease is not None and (
            method == "POST" or version not in (None, self.store.lease["metadata"]["resourceVersion"])
        ):
            raise answered(409)
        return await self._answer(self.store.put(lease))

    async def _answer(self, lease: Document) -> Document:
        await asyncio.sleep(self.answers_after)
        if self.loses_answers:
            raise ConnectionResetError("the connection was reset")
        return lease


class Replica:
    """An operator: it writes every 0.1 s while it leads and may."""

    def __init__(self, loop: SimulatedLoop, store: Store, identity: str) -> None:
        self.loop, self.identity = loop, identity
        self.wire = Wire(store)
        self.stalled = 0.0
        self.elector = Elector(self.wire, NAME, NAMESPACE, identity, clock=loop.time)
        self.leads = False
        self.wrote: list[float] = []
        self.task = asyncio.create_task(self.elector.run(self.work))

    async def work(self) -> None:
        self.leads = True
        try:
            while True:
                if self.elector.may_write():
                    self.wrote.append(self.loop.time())
                await asyncio.sleep(0.1)
        finally:
            self.leads = False

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def until(true: Callable[[], bool], seconds: float) -> float:
    """Simulated seconds until it is true; fails after so many."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    while not true():
        assert loop.time() - begin < seconds, "it did not happen"
        await asyncio.sleep(0.01)
    return loop.time() - begin


def assert_never_two(*replicas: Replica) -> None:
    """No write of one falls between two writes of another that it did in one go."""
    spans = sorted((min(r.wrote), max(r.wrote), r.identity) for r in replicas if r.wrote)
    for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
        assert end < begin, f"{first} and {second} wrote at the same time"


def test_only_one_of_many_leads_and_the_lease_names_it() -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        replicas = [Replica(loop, store, f"pod-{number}") for number in range(5)]
        await asyncio.sleep(300)
        (leader,) = [each for each in replicas if each.leads]
        assert [each for each in replicas if each.wrote] == [leader]
        assert [each for each in replicas if each.elector.may_write()] == [leader]
        spec = store.spec()
        assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == (
            leader.identity,
            15,
            0,
        )
        assert store.writes < 300 / PERIOD / 0.7, "one write a period"

    simulated(history)


def test_a_leader_that_ends_hands_over_at_once() -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        first = Replica(loop, store, "first")
        await until(lambda: first.leads, 1)
        second = Replica(loop, store, "second")
        await asyncio.sleep(30)
        acquired = store.spec()["acquireTime"]
        await first.stop()
        assert store.spec()["holderIdentity"] == ""
        assert not first.elector.may_write()
        assert await until(lambda: second.leads, DURATION) < 2 * PERIOD
        assert (store.spec()["holderIdentity"], store.spec()["leaseTransitions"]) == ("second", 1)
        assert store.spec()["acquireTime"] != acquired
        assert_never_two(first, second)

    simulated(history)


def test_a_standby_that_ends_leaves_the_lease_to_the_leader() -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        leader = Replica(loop, store, "leader")
        await until(lambda: leader.leads, 1)
        standby = Replica(loop, store, "standby")
        await asyncio.sleep(30)
        await standby.stop()
        await asyncio.sleep(30)
        assert leader.leads
        assert store.spec()["holderIdentity"] == "leader"

    simulated(history)


def test_a_killed_leader_is_followed_after_the_duration() -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        first = Replica(loop, store, "first")
        second = Replica(loop, store, "second")
        await until(lambda: first.leads or second.leads, 1)
        leader, other = (first, second) if first.leads else (second, first)
        await asyncio.sleep(30)
        leader.wire.fails = ConnectionRefusedError("killed: not even a release arrives")
        await leader.stop()
        waited = await until(lambda: other.leads, 2 * DURATION)
        assert DURATION - 2 * PERIOD < waited < DURATION + 2 * PERIOD
        assert_never_two(first, second)

    simulated(history)


@each_case("error", [answered(500), answered(429), ConnectionResetError(), TimeoutError()])
def test_a_leader_outlives_an_outage_shorter_than_the_deadline(error: Exception) -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        leader = Replica(loop, store, "leader")
        await until(lambda: leader.leads, 1)
        for _ in range(20):
            leader.wire.fails = error
            await asyncio.sleep(DEADLINE - 2.5 * PERIOD)
            leader.wire.fails = None
            await asyncio.sleep(5)
        assert leader.leads
        assert not leader.task.done()

    simulated(history)


def test_a_leader_without_server_stops_before_the_next() -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        first = Replica(loop, store, "first")
        await until(lambda: first.leads, 1)
        second = Replica(loop, store, "second")
        await asyncio.sleep(30)
        first.wire.hangs = True
        cut = loop.time()
        with pytest.raises(LostLeaseError, match="could not be renewed for 10 s"):
            await first.task
        assert loop.time() - cut <= DEADLINE + 2 * PERIOD
        assert max(first.wrote) < cut + DEADLINE
        await until(lambda: second.leads, 2 * DURATION)
        assert store.spec()["holderIdentity"] == "second"
        assert_never_two(first, second)

    simulated(history)


def test_the_deadline_counts_from_the_servers_renewal() -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        leader = Replica(loop, store, "leader")
        leader.wire.answers_after = 3
        await until(lambda: leader.leads, 5)
        await asyncio.sleep(30)
        leader.wire.fails = answered(500)
        with pytest.raises(LostLeaseError):
            await leader.task
        assert max(leader.wrote) < store.written + DEADLINE

    simulated(history)


def test_a_leader_that_stalled_writes_nothing_and_ends() -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        first = Replica(loop, store, "first")
        await until(lambda: first.leads, 1)
        await asyncio.sleep(30)
        loop.jumping.now += 24
        woke = loop.time()
        with pytest.raises(LostLeaseError):
            await first.task
        assert max(first.wrote) < woke - 20
        assert loop.time() - woke < 2 * PERIOD

    simulated(history)


def test_a_lease_that_another_has_taken_is_lost_at_once() -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        leader = Replica(loop, store, "leader")
        await until(lambda: leader.leads, 1)
        assert store.lease is not None
        store.put({**store.lease, "spec": {**store.spec(), "holderIdentity": "thief"}})
        with pytest.raises(LostLeaseError, match="now held by thief"):
            await leader.task
        assert not leader.elector.may_write()
        assert store.spec()["holderIdentity"] == "thief", "it is not given back for the thief"

    simulated(history)


def test_a_lease_that_was_deleted_is_lost() -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        leader = Replica(loop, store, "leader")
        await until(lambda: leader.leads, 1)
        store.lease = None
        with pytest.raises(LostLeaseError, match="held by nobody"):
            await leader.task

    simulated(history)


def test_a_renewal_whose_answer_was_lost_is_recognised() -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        leader = Replica(loop, store, "leader")
        await until(lambda: leader.leads, 1)
        leader.wire.loses_answers = True
        await asyncio.sleep(5)
        leader.wire.loses_answers = False
        await asyncio.sleep(60)
        assert leader.leads

    simulated(history)


def test_clocks_that_differ_between_machines_do_not_matter() -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        first = Replica(loop, store, "first")
        await until(lambda: first.leads, 1)
        assert store.lease is not None
        second = Replica(loop, store, "second")
        for _ in range(50):
            await asyncio.sleep(1.9)
            old = {**store.spec(), "renewTime": "1999-01-01T00:00:00.000000Z"}
            store.lease = {**store.lease, "metadata": store.lease["metadata"], "spec": old}
        assert first.leads
        assert not second.wrote

    simulated(history)


def test_a_restarted_container_takes_its_lease_at_once() -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        before = Replica(loop, store, "pod")
        await until(lambda: before.leads, 1)
        before.wire.fails = ConnectionRefusedError("killed")
        await before.stop()
        again = Replica(loop, store, "pod")
        assert await until(lambda: again.leads, DURATION) < PERIOD
        assert store.spec()["leaseTransitions"] == 0

    simulated(history)


def test_what_the_leading_task_raises_frees_the_lease() -> None:
    async def broken() -> None:
        await asyncio.sleep(1)
        raise KeyError("a bug")

    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        elector = Elector(Wire(store), NAME, NAMESPACE, "pod", clock=loop.time)
        with pytest.raises(KeyError, match="a bug"):
            await elector.run(broken)
        assert store.spec()["holderIdentity"] == ""

    simulated(history)


def test_what_a_leader_does_to_end_it_does_as_the_leader() -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        elector = Elector(Wire(store), NAME, NAMESPACE, "pod", clock=loop.time)
        at_the_end: list[tuple[bool, str]] = []

        async def lead() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(30)
                at_the_end.append((elector.may_write(), store.spec()["holderIdentity"]))

        task = asyncio.create_task(elector.run(lead))
        await asyncio.sleep(20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert at_the_end == [(True, "pod")]
        assert store.spec()["holderIdentity"] == ""

    simulated(history)


def test_writing_stops_before_the_claim_has_run_out() -> None:
    assert 0 < PERIOD < DEADLINE < DURATION


class Shift:
    """A replica that starts again under a new name whenever it has lost; what goes wrong with it is thrown by dice."""

    def __init__(self, loop: SimulatedLoop, store: Store, number: int, writes: list[tuple[float, str]]) -> None:
        self.loop, self.store, self.number, self.writes = loop, store, number, writes
        self.dice = random.Random(number)
        self.lives = 0

    async def run(self) -> None:
        while True:
            self.lives += 1
            wire, identity = Wire(self.store), f"pod-{self.number}-{self.lives}"
            elector = Elector(wire, NAME, NAMESPACE, identity, clock=self.loop.time)
            troubles = asyncio.create_task(self._trouble(wire))
            with contextlib.suppress(LostLeaseError):
                await elector.run(functools.partial(self._write, elector, identity))
            troubles.cancel()

    async def _write(self, elector: Elector, identity: str) -> None:
        while True:
            if elector.may_write():
                self.writes.append((self.loop.time(), identity))
            await asyncio.sleep(0.1)

    async def _trouble(self, wire: Wire) -> None:
        while True:
            await asyncio.sleep(self.dice.uniform(1, 60))
            wire.hangs, wire.fails, wire.loses_answers = self.dice.choice(
                ((True, None, False), (False, answered(500), False), (False, None, True))
            )
            await asyncio.sleep(self.dice.uniform(1, 30))
            wire.hangs, wire.fails, wire.loses_answers = False, None, False


def test_random_outages_never_make_two_leaders() -> None:
    async def history(loop: SimulatedLoop) -> None:
        store = Store()
        writes: list[tuple[float, str]] = []
        shifts = [asyncio.create_task(Shift(loop, store, number, writes).run()) for number in range(3)]
        await asyncio.sleep(5000)
        for each in shifts:
            assert not each.done()
            each.cancel()
        await asyncio.gather(*shifts, return_exceptions=True)
        turns = [writer for writer, _ in itertools.groupby(identity for _, identity in writes)]
        assert len(turns) > 20
        assert len(set(turns)) == len(turns), "a replica wrote after another had begun"

    simulated(history)
