"""The engine: observe, decide, apply for every key; live reads; what one job does to another."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from rlhf_api.status import Status
from rlhf_operator import reconciler as reconciler_module
from rlhf_operator.actions import Create, Plan, ReadLive
from rlhf_operator.cluster.apply import RefusedError, StaleError
from rlhf_operator.cluster.cache import Key
from rlhf_operator.cluster.client import ApiError, NotLeadingError
from rlhf_operator.reconciler import Decide, Reconciler
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Heartbeat, ObservedJob, ObservedPod, Refusal, Snapshot
from rlhf_operator.times import ServerClock

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def job(name: str) -> ObservedJob:
    return ObservedJob(
        namespace="n",
        name=name,
        uid=f"uid-{name}",
        generation=1,
        resource_version="7",
        created=NOW,
        deleting=False,
        labels={},
        spec={},
        status=Status(),
    )


class World:
    """A cluster of jobs that are only names; it remembers what the engine asked of it."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.settings = Settings()
        self.heartbeats = self
        self.looks: list[tuple[str, bool]] = []
        self.applied: list[str] = []
        self.failures: dict[str, list[Exception]] = {}
        self.heads: set[str] = set()
        self.polls: list[str] = []
        self.is_deaf = False
        self.heard: Heartbeat | None = None
        self.news = False
        self.syncs = 0
        self.next: list[str] = []
        self.results: list[str] = []
        self.at_once = self.most_at_once = 0
        self.failing: dict[Key, float] = {}
        self.acts: Callable[[str], Awaitable[None]] | None = None

    async def sync(self) -> None:
        self.syncs += 1
        if self.failures.get("sync"):
            raise self.failures["sync"].pop(0)

    def next_in_line(self) -> list[Key]:
        if self.failures.get("line"):
            raise self.failures["line"].pop(0)
        return [("n", self.next.pop(0))] if self.next else []

    def keys(self) -> Iterable[Key]:
        return [("n", name) for name in self.names]

    async def observe(self, key: Key, *, fresh: bool, since: datetime) -> Snapshot | None:
        self.looks.append((key[1], fresh))
        if key[1] not in self.names:
            return None
        return Snapshot(job=job(key[1]), watching_since=since, fresh=fresh)

    async def act(self, snapshot: Snapshot, _plan: Plan) -> None:
        if self.acts:
            await self.acts(snapshot.job.name)

    async def write_status(self, snapshot: Snapshot, plan: Plan) -> None:
        assert plan.requeue_after is None or plan.requeue_after > 0
        name = snapshot.job.name
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.005)
        self.at_once -= 1
        if self.failures.get(name):
            raise self.failures[name].pop(0)
        self.applied.append(name)

    def head(self, key: Key) -> tuple[str, ObservedPod] | None:
        if key[1] not in self.heads:
            return None
        return f"uid-{key[1]}", ObservedPod(name="head", uid="p", attempt=1, role="controller", created=NOW)

    async def read(self, job_uid: str, pod: ObservedPod) -> bool:
        self.polls.append(job_uid)
        assert pod.name == "head"
        if not self.is_deaf:
            self.heard = Heartbeat(attempt=1, received=NOW, status=Status())
        return self.news

    def last(self, job_uid: str, attempt: int | None) -> Heartbeat | None:
        assert (job_uid, attempt) == ("uid-a", 1)
        return self.heard

    def reconciled(self, result: str, seconds: float) -> None:
        assert seconds >= 0
        self.results.append(result)


def nothing_to_do(snapshot: Snapshot, now: datetime, settings: Settings) -> Plan:
    assert now.tzinfo
    assert settings.status_interval_seconds
    return Plan(status=snapshot.job.status)


def run(world: World, decide: Decide, test: Callable[[Reconciler], Awaitable[None]], **settings: Any) -> None:
    """A leading engine in a loop of its own."""

    async def main() -> None:
        parts: dict[str, Any] = {"observer": world, "applier": world, "clock": ServerClock().now}
        world.settings = Settings(**settings)
        engine = Reconciler(decide, reconciled=world.reconciled, **parts)
        leading = asyncio.create_task(engine.lead())
        try:
            await asyncio.wait_for(test(engine), 20)
            assert not leading.done()
        finally:
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)
        assert not engine.leads

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 the condition is of plain values
        await asyncio.sleep(0.005)


def test_a_new_leader_looks_at_every_job_after_a_whole_list() -> None:
    world = World("a", "b", "c")

    async def test(engine: Reconciler) -> None:
        await until(lambda: sorted(world.applied) == ["a", "b", "c"])
        assert world.syncs == 1
        assert engine.unready() is None

    run(world, nothing_to_do, test)


def test_nothing_is_decided_before_the_first_list_has_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("a")
    world.failures["sync"] = [ApiError(500, "not now"), ApiError(0, "nobody there")]
    pauses: list[float] = []
    real = asyncio.sleep

    async def quick(seconds: float) -> None:
        if seconds >= 0.5:
            pauses.append(seconds)
            assert not world.looks
        await real(min(seconds, 0.001))

    monkeypatch.setattr(asyncio, "sleep", quick)

    async def test(engine: Reconciler) -> None:
        assert engine.unready()
        await until(lambda: world.applied == ["a"])
        assert pauses == [0.5, 1.0]

    run(world, nothing_to_do, test)


def test_a_wish_for_a_live_look_is_granted_once() -> None:
    world = World("a")
    asked: list[bool] = []

    def decide(snapshot: Snapshot, now: datetime, settings: Settings) -> Plan:
        asked.append(snapshot.fresh)
        assert not world.applied
        if not snapshot.fresh:
            return Plan(status=Status(phase="Failed"), actions=(ReadLive(why="no way back"),))
        return nothing_to_do(snapshot, now, settings)

    async def test(_: Reconciler) -> None:
        await until(lambda: world.applied)
        assert asked == [False, True]
        assert world.looks == [("a", False), ("a", True)]
        assert world.results == ["done"]

    run(world, decide, test)


def test_a_pass_decides_by_the_settings_that_hold_now() -> None:
    world = World("a")
    seen: list[Settings] = []

    def decide(snapshot: Snapshot, now: datetime, settings: Settings) -> Plan:
        seen.append(settings)
        return nothing_to_do(snapshot, now, settings)

    async def test(engine: Reconciler) -> None:
        await until(lambda: len(world.applied) == 1)
        world.settings = Settings(grace_period_seconds=77)
        engine.enqueue([("n", "a")])
        await until(lambda: len(world.applied) == 2)
        assert [each.grace_period_seconds for each in seen] == [300, 77]

    run(world, decide, test)


def test_a_decision_that_is_never_content_fails_its_pass_only() -> None:
    world = World("a", "b")

    def decide(snapshot: Snapshot, now: datetime, settings: Settings) -> Plan:
        if snapshot.job.name == "a":
            return Plan(status=Status(), actions=(ReadLive(why="never sure"),))
        return nothing_to_do(snapshot, now, settings)

    async def test(_: Reconciler) -> None:
        await until(lambda: world.results.count("error") >= 2 and world.applied == ["b"])

    run(world, decide, test)


def test_the_next_in_line_is_called_even_after_a_mistake() -> None:
    world = World("a", "b")
    world.failures["line"] = [ZeroDivisionError()]

    async def test(_: Reconciler) -> None:
        await until(lambda: len(world.applied) == 2 and not world.failures["line"])
        world.next.append("b")
        await until(lambda: len(world.applied) == 3)
        assert world.applied[2] == "b"

    run(world, nothing_to_do, test)


def test_a_stale_pass_is_repeated_on_a_live_look() -> None:
    world = World("a")
    world.failures["a"] = [StaleError("changed")]

    async def test(_: Reconciler) -> None:
        await until(lambda: world.applied)
        assert world.looks == [("a", False), ("a", True)]
        assert world.results == ["stale", "done"]

    run(world, nothing_to_do, test)


def test_a_refusal_is_known_to_the_next_passes() -> None:
    world = World("a")
    refusal = Refusal(reason="CreateRefused", message="exceeded quota")
    world.failures["a"] = [RefusedError(refusal)]
    known: list[Refusal | None] = []

    def decide(snapshot: Snapshot, now: datetime, settings: Settings) -> Plan:
        known.append(snapshot.refused)
        return nothing_to_do(snapshot, now, settings)

    async def test(_: Reconciler) -> None:
        await until(lambda: len(world.applied) == 2)
        assert known == [None, refusal, None]

    run(world, decide, test)


def test_an_error_in_one_job_stops_no_other() -> None:
    world = World("bad", "broken", "good")
    world.failures["bad"] = [ApiError(500, "no")] * 1000
    world.failures["broken"] = [ZeroDivisionError()] * 1000

    async def test(engine: Reconciler) -> None:
        for count in range(1, 6):
            engine.enqueue([("n", "good")])
            await until(lambda count=count: world.applied.count("good") >= count)  # type: ignore[misc]
        await until(lambda: world.results.count("error") >= 4)
        assert set(world.applied) == {"good"}

    run(world, nothing_to_do, test)


def test_a_pass_that_may_not_write_is_given_up_quietly() -> None:
    world = World("a")
    world.failures["a"] = [NotLeadingError()]

    async def test(_: Reconciler) -> None:
        await until(lambda: world.results == ["stale"])
        await asyncio.sleep(0.5)
        assert world.looks == [("a", False)]

    run(world, nothing_to_do, test)


def test_time_alone_brings_a_job_back_when_the_plan_says_so() -> None:
    world = World("a")
    answers = iter([0.1, 0.1, None])

    def decide(snapshot: Snapshot, _now: datetime, _settings: Settings) -> Plan:
        return replace(Plan(status=snapshot.job.status), requeue_after=next(answers))

    async def test(_: Reconciler) -> None:
        await until(lambda: len(world.applied) == 3)
        await asyncio.sleep(0.4)
        assert len(world.applied) == 3

    run(world, decide, test)


def test_a_job_for_which_something_was_made_is_looked_at_again() -> None:
    world = World("a")

    def make_once(snapshot: Snapshot, now: datetime, settings: Settings) -> Plan:
        plan = nothing_to_do(snapshot, now, settings)
        return plan if world.applied else replace(plan, actions=(Create(manifest={}),))

    async def test(_: Reconciler) -> None:
        await until(lambda: world.applied == ["a", "a"])
        await asyncio.sleep(0.05)
        assert world.applied == ["a", "a"]

    run(world, make_once, test)


def test_jobs_run_side_by_side_and_none_twice_at_once() -> None:
    world = World(*(f"j{number}" for number in range(40)))

    async def test(engine: Reconciler) -> None:
        await until(lambda: len(world.applied) >= 40)
        assert 1 < world.most_at_once <= reconciler_module.WORKERS
        world.most_at_once = 0
        for _ in range(10):
            engine.enqueue([("n", "j1")])
            await asyncio.sleep(0.002)
        assert world.most_at_once <= 1

    run(world, nothing_to_do, test)


def test_one_job_at_a_time_looks_at_what_is_free_and_reserves_it() -> None:
    world = World(*"abcdefgh")
    looking: list[str] = []

    def reserve(snapshot: Snapshot, now: datetime, settings: Settings) -> Plan:
        if not snapshot.alone:
            return Plan(status=Status(), actions=(ReadLive(why="room is reserved", alone=True),))
        assert snapshot.fresh
        looking.append(snapshot.job.name)
        assert looking == [*world.applied, looking[-1]], "all that looked before have written what they reserve"
        return nothing_to_do(snapshot, now, settings)

    async def test(_: Reconciler) -> None:
        await until(lambda: len(world.applied) == 8)
        assert sorted(looking) == list("abcdefgh")
        assert world.results == ["done"] * 8

    run(world, reserve, test)


def test_what_follows_a_reservation_holds_up_no_other() -> None:
    world = World("a", "b")
    goes_on = asyncio.Event()

    async def hang(name: str) -> None:
        if name == "a":
            await goes_on.wait()

    world.acts = hang

    def reserve(snapshot: Snapshot, now: datetime, settings: Settings) -> Plan:
        if not snapshot.alone:
            return Plan(status=Status(), actions=(ReadLive(why="room is reserved", alone=True),))
        return nothing_to_do(snapshot, now, settings)

    async def test(_: Reconciler) -> None:
        await until(lambda: sorted(world.applied) == ["a", "b"])
        goes_on.set()
        await until(lambda: world.results == ["done"] * 2)

    run(world, reserve, test)


def test_a_server_that_is_away_is_no_fault_of_a_job() -> None:
    """Else those behind it in line would begin before it."""
    world = World("a")
    world.failures["a"] = [ApiError(0, "no answer"), ApiError(503, "not now")]

    async def test(_: Reconciler) -> None:
        await until(lambda: world.results.count("error") == 2)
        assert world.failing == {}
        await until(lambda: world.applied == ["a"])

    run(world, nothing_to_do, test)


def test_whose_passes_fail_is_known_until_one_succeeds() -> None:
    world = World("a", "b")
    world.failures["a"] = [ApiError(403, "no"), RuntimeError("a bug")]

    async def test(engine: Reconciler) -> None:
        await until(lambda: world.results.count("error") == 1)
        since = world.failing["n", "a"]
        await until(lambda: world.results.count("error") == 2)
        assert world.failing == {("n", "a"): since}
        assert engine.queue.failures == {("n", "a"): 2}
        await until(lambda: not world.failing)
        assert engine.queue.failures == {}
        assert sorted(world.applied) == ["a", "b"]

    run(world, nothing_to_do, test)


def test_a_job_that_is_gone_is_not_applied() -> None:
    world = World("a")

    async def test(engine: Reconciler) -> None:
        await until(lambda: world.applied == ["a"])
        engine.enqueue([("n", "gone")])
        await until(lambda: ("gone", False) in world.looks)
        assert world.applied == ["a"]

    run(world, nothing_to_do, test)


def test_head_pods_are_polled_and_news_brings_a_pass() -> None:
    world = World("a", "b")
    world.heads = {"a"}

    async def test(_: Reconciler) -> None:
        await until(lambda: len(world.polls) >= 3)
        assert set(world.polls) == {"uid-a"}
        passes = world.applied.count("a")
        assert passes == 1
        world.news = True
        await until(lambda: world.applied.count("a") > passes)
        assert world.applied.count("b") == 1
        world.heads.clear()
        await asyncio.sleep(0.2)
        polls = len(world.polls)
        await asyncio.sleep(0.2)
        assert len(world.polls) == polls

    run(world, nothing_to_do, test, status_interval_seconds=0.05)


def test_a_head_pod_is_polled_although_every_pass_is_refused() -> None:
    world = World("a")
    world.heads = {"a"}
    world.failures["a"] = [RefusedError(Refusal(reason="CreateRefused", message="exceeded quota"))] * 1000

    async def test(_: Reconciler) -> None:
        await until(lambda: world.polls)
        assert not world.applied

    run(world, nothing_to_do, test, status_interval_seconds=0.05)


def test_a_watch_that_began_anew_is_mended_by_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler_module, "RELIST_DELAY_SECONDS", 0.05)
    world = World("a")

    async def test(engine: Reconciler) -> None:
        await until(lambda: world.applied == ["a"])
        engine.relist()
        engine.relist()
        await until(lambda: world.applied == ["a", "a"])
        assert world.syncs == 2

    run(world, nothing_to_do, test)


def test_an_engine_that_does_not_lead_does_nothing() -> None:
    world = World("a")

    async def main() -> None:
        parts: dict[str, Any] = {"observer": world, "applier": world, "clock": ServerClock().now}
        engine = Reconciler(nothing_to_do, reconciled=world.reconciled, **parts)
        await engine.sync()
        engine.enqueue([("n", "a")])
        await asyncio.sleep(0.1)
        assert len(engine.queue) == 0
        assert not world.looks

    asyncio.run(main())


def test_a_pass_that_never_ends_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler_module, "STUCK_SECONDS", 0.05)
    world = World("a")
    never = asyncio.Event()

    async def hang(_snapshot: Snapshot, _plan: Plan) -> None:
        await never.wait()

    monkeypatch.setattr(world, "act", hang)

    async def test(engine: Reconciler) -> None:
        await until(engine.unhealthy)
        assert "n/a" in str(engine.unhealthy())

    run(world, nothing_to_do, test)
