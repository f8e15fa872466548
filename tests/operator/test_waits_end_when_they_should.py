"""Bounds that the operator keeps in time and in advice: each is tested on both of its sides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_operator import failure
from rlhf_operator.placement import map_job
from rlhf_operator.reconciler import Reconciler
from rlhf_operator.snapshot import ObservedContainer
from rlhf_operator.times import ServerClock
from tests.each import each_case
from tests.operator import test_reconciler as engines
from tests.operator.rendered import SETTINGS, changed, mapped, nodes, snapshot
from tests.operator.running_jobs import failed, running
from tests.operator.simulated import World


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is to be done."""

    skipped = 0.0

    def time(self) -> float:
        return super().time() + self.skipped

    def _run_once(self) -> None:
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if timers and not self._ready:  # type: ignore[attr-defined]
            self.skipped += max(0.0, min(each.when() for each in timers) - self.time())
        super()._run_once()  # type: ignore[misc]


def moments_of_lists(count: int, meanwhile: Callable[[Reconciler], None]) -> list[float]:
    """Seconds between the first lists of a leading engine; `meanwhile` is called after each of them."""
    moments: list[float] = []
    enough = asyncio.Event()
    world = engines.World()
    parts: dict[str, Any] = {"observer": world, "applier": world, "clock": ServerClock().now}
    engine = Reconciler(engines.nothing_to_do, reconciled=world.reconciled, **parts)

    async def sync() -> None:
        moments.append(asyncio.get_running_loop().time())
        meanwhile(engine)
        if len(moments) == count:
            enough.set()

    world.sync = sync  # type: ignore[method-assign]

    async def main() -> None:
        leading = asyncio.create_task(engine.lead())
        await enough.wait()
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(main())
    return [later - before for before, later in pairwise(moments)]


def test_a_missed_event_does_harm_for_five_minutes() -> None:
    """Everything is listed every five minutes, not always at the same distance."""
    waits = moments_of_lists(20, lambda engine: None)
    assert 270 <= min(waits) < max(waits) < 331


def test_a_watch_that_reconnects_is_mended_soon() -> None:
    """The list waits for the other watches, which reconnect in the same seconds."""
    waits = moments_of_lists(3, lambda engine: engine.relist())
    assert all(9 < seconds < 12 for seconds in waits), waits


@each_case(("seconds_back", "waits"), [(1, True), (3, False), (100, False), (300, False)])
def test_a_clock_that_was_set_back_ends_the_wait(seconds_back: int, waits: bool) -> None:
    """The end of an attempt lies ahead by the rounding to whole seconds, or because a clock was wrong."""
    world = running()
    world.end(8, "ranks do not answer")
    world.ray_tells()
    world.settle()
    assert world.phase == "Running"
    world.wait(-seconds_back)
    world.settle()
    assert (world.phase == "Running") == waits


def lose_head(world: World) -> None:
    del world.pods[world.head().name]


def lose_worker(world: World) -> None:
    del world.pods[world.worker().name]


def end_with(code: int) -> Callable[[World], None]:
    def end(world: World) -> None:
        world.end(code)
        world.ray_tells()

    return end


UNEXPLAINED = {
    "a lost head": lose_head,
    "a lost worker": lose_worker,
    "a lost connection": end_with(8),
    "a signal": end_with(137),
}


@each_case("what", UNEXPLAINED)
@each_case(
    ("fields", "reason"),
    [({"disruption": "PreemptionByScheduler"}, "Preempted"), ({"reason": "NodeLost"}, "NodeLost")],
    ids=["preempted", "node lost"],
)
def test_a_pod_that_is_gone_explains(what: str, fields: dict[str, Any], reason: str) -> None:
    """What Kubernetes did to a pod is not counted against the user: no attempt of the limit is used."""
    world = running()
    fallen = replace(world.worker(), **fields)
    UNEXPLAINED[what](world)
    seen = replace(world.observe(fresh=True), lost_pods=(fallen,))
    found = failure.classify(seen, world.now, ready_since=world.now)
    assert found is not None
    assert (found.reason, found.pod) == (reason, fallen.name)


@each_case("code", [2, 3, 6, 7])
def test_a_pod_that_is_gone_excuses_no_mistake(code: int) -> None:
    world = running()
    fallen = replace(world.worker(), disruption="PreemptionByScheduler")
    end_with(code)(world)
    seen = replace(world.observe(fresh=True), lost_pods=(fallen,))
    found = failure.classify(seen, world.now, ready_since=world.now)
    assert found is not None
    assert found.exit_code == code
    assert found.reason in ("Spec", "Data", "Numerics", "UserCode")


@pytest.mark.parametrize(("seconds", "reason"), [(59, None), (61, "NodeLost")])
def test_a_node_may_be_silent_for_a_minute(seconds: int, reason: str | None) -> None:
    world = running(nodes=tuple(nodes(2, prefix="node-")))
    silent = world.worker()
    world.change(silent.name, ready=False, not_ready_since=world.now)
    world.nodes = tuple(replace(node, ready=node.name != silent.node) for node in world.nodes or ())
    world.wait(seconds)
    found = failure.classify(world.observe(fresh=True), world.now, ready_since=world.now)
    assert (found.reason if found else None) == reason


@pytest.mark.parametrize(("slower", "named"), [(1.01, False), (1.14, False), (1.16, True)])
def test_a_placement_is_advised_from_15_percent(slower: float, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job, there = changed("helpful-ppo", {"resources.device": "CPU"}), nodes(2)
    have = mapped(job, there)
    assert have.predicted_step_seconds
    now = SimpleNamespace(prediction=SimpleNamespace(step_seconds=slower * have.predicted_step_seconds))
    monkeypatch.setattr(map_job, "predicted", lambda *_: now)
    assert bool(map_job.better(job, have, snapshot(job, there), SETTINGS)) == named


@pytest.mark.parametrize(("code", "seconds"), [(8, 60), (None, 30)])
def test_a_better_reason_may_come_for_so_long(code: int | None, seconds: float) -> None:
    """Kubernetes notices a lost node after the trainer; the last status may come after Ray's word."""
    world = running()
    world.end(code or 137)
    world.ray_tells()
    if code is None:
        live = world.live
        assert live
        world.rayjobs[live.name] = replace(live, message="")
        world.beat, world.trainer = None, None
    world.settle()
    assert world.phase == "Running"
    world.wait(seconds - 1)
    world.settle()
    assert world.phase == "Running"
    world.wait(2)
    world.settle()
    assert world.phase == "Restarting"
    assert failed(world).reason in ("Communication", "Unknown")


@pytest.mark.parametrize(("seconds", "avoided"), [(3599, 1), (3601, 0)])
def test_a_node_is_avoided_for_an_hour(seconds: int, avoided: int) -> None:
    world = running(nodes=tuple(nodes(3, prefix="node-")))
    ended = ObservedContainer(name="ray-worker", exit_code=1, ended_reason="Error")
    world.change(world.worker().name, phase="Failed", ready=False, containers=(ended,))
    world.settle()
    assert failed(world).reason == "WorkerLost"
    world.wait(seconds)
    assert len(failure.bad_nodes(world.observe(fresh=True), world.now)) == avoided
