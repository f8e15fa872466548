"""The engine where head pods are deaf, and where it ends itself."""

import asyncio
from typing import Any

import pytest

from rlhf_operator.cluster.client import NoClusterError
from rlhf_operator.reconciler import Reconciler
from rlhf_operator.times import ServerClock
from tests.operator.test_reconciler import World, nothing_to_do, run, until


def test_a_silent_head_pod_is_asked_less_and_less_often() -> None:
    world = World("a")
    world.heads, world.is_deaf = {"a"}, True

    async def polled(seconds: float) -> int:
        polls = len(world.polls)
        await asyncio.sleep(seconds)
        return len(world.polls) - polls

    async def test(_: Reconciler) -> None:
        await until(lambda: len(world.polls) >= 4)
        assert await polled(1.0) <= 6, "20 would be at every interval"
        world.is_deaf, polls = False, len(world.polls)
        await until(lambda: len(world.polls) >= polls + 5)

    run(world, nothing_to_do, test, status_interval_seconds=0.05)


def test_what_ends_the_work_says_what_it_was() -> None:
    world = World("a")

    async def main() -> None:
        parts: dict[str, Any] = {"observer": world, "applier": world, "clock": ServerClock().now}

        def reconciled(_result: str, _seconds: float) -> None:
            raise NoClusterError("no credentials")

        with pytest.raises(NoClusterError, match="no credentials"):
            await Reconciler(nothing_to_do, reconciled=reconciled, **parts).lead()

    asyncio.run(main())
