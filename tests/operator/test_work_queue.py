"""The queue of keys: never twice, never with two workers, at the time set last."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rlhf_operator.work_queue import REST_SECONDS, WorkQueue

Test = Callable[[WorkQueue[str]], Awaitable[None]]


def run(test: Test) -> None:
    """In a loop of its own."""

    async def main() -> None:
        await asyncio.wait_for(test(WorkQueue()), 20)

    asyncio.run(main())


async def is_empty(queue: WorkQueue[str]) -> bool:
    try:
        async with asyncio.timeout(0.05):
            await queue.get()
    except TimeoutError:
        return True
    return False


def test_a_key_that_is_added_twice_comes_once() -> None:
    async def test(queue: WorkQueue[str]) -> None:
        queue.add("a")
        queue.add("a")
        assert len(queue) == 1
        assert await queue.get() == "a"
        queue.done("a")
        assert await is_empty(queue)

    run(test)


def test_a_key_that_a_worker_has_comes_again_only_after_that() -> None:
    async def test(queue: WorkQueue[str]) -> None:
        queue.add("a")
        await queue.get()
        queue.add("a")
        assert await is_empty(queue)
        queue.done("a")
        assert await queue.get() == "a"

    run(test)


def test_events_soon_after_a_pass_come_together() -> None:
    async def test(queue: WorkQueue[str]) -> None:
        queue.add("a")
        queue.done(await queue.get())
        for _ in range(3):
            queue.add("a")
            assert await is_empty(queue)
        queue.done(await queue.get())
        assert await is_empty(queue)
        await asyncio.sleep(2 * REST_SECONDS)
        queue.add("a")
        assert not await is_empty(queue)

    run(test)


def test_keys_come_in_the_order_in_which_they_were_added() -> None:
    async def test(queue: WorkQueue[str]) -> None:
        for key in "abcab":
            queue.add(key)
        assert [await queue.get() for _ in "abc"] == list("abc")

    run(test)


def test_the_time_set_last_is_the_only_one() -> None:
    async def test(queue: WorkQueue[str]) -> None:
        queue.add_after("a", 0.05)
        queue.add_after("a", 3600)
        assert queue.knows("a")
        await asyncio.sleep(0.2)
        assert await is_empty(queue)
        queue.add_after("a", 0.05)
        assert await queue.get() == "a"
        queue.done("a")
        queue.add_after("a", 0.05)
        queue.add_after("a", None)
        assert not queue.knows("a")
        await asyncio.sleep(0.2)
        assert await is_empty(queue)

    run(test)


def test_nothing_comes_at_a_time_after_the_end() -> None:
    async def test(queue: WorkQueue[str]) -> None:
        queue.add_after("a", 0.05)
        queue.close()
        await asyncio.sleep(0.2)
        assert await is_empty(queue)

    run(test)


def test_pauses_grow_to_a_limit_and_restart_after_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def middle(low: float, high: float) -> float:
        return (low + high) / 2

    monkeypatch.setattr("random.uniform", middle)

    async def test(queue: WorkQueue[str]) -> None:
        pauses = [queue.retry("a") for _ in range(30)]
        assert pauses[:3] == [0.2, 0.4, 0.8]
        assert pauses[-1] == 120
        assert queue.retry("b") == 0.2
        queue.succeeded("a")
        assert queue.retry("a") == 0.2
        queue.close()

    run(test)


def test_pauses_are_spread() -> None:
    async def test(queue: WorkQueue[str]) -> None:
        assert len({queue.retry(str(number)) for number in range(20)}) > 10
        queue.close()

    run(test)


def test_many_workers_never_have_one_key_at_once() -> None:
    async def test(queue: WorkQueue[str]) -> None:
        busy: set[str] = set()
        passes: list[str] = []

        async def work() -> None:
            while True:
                key = await queue.get()
                assert key not in busy
                busy.add(key)
                await asyncio.sleep(0.001)
                busy.discard(key)
                passes.append(key)
                queue.done(key)

        workers: list[asyncio.Task[Any]] = [asyncio.create_task(work()) for _ in range(8)]
        for number in range(300):
            queue.add(str(number % 5))
            if number % 7 == 0:
                await asyncio.sleep(0.001)
        await asyncio.sleep(4 * REST_SECONDS)
        assert not len(queue)
        assert set(passes) == set("01234")
        assert not any(worker.done() for worker in workers)
        for worker in workers:
            worker.cancel()

    run(test)


def test_the_longest_busy_key_is_known() -> None:
    async def test(queue: WorkQueue[str]) -> None:
        assert queue.longest_busy() is None
        queue.add("a")
        queue.add("b")
        await queue.get()
        await asyncio.sleep(0.02)
        await queue.get()
        longest = queue.longest_busy()
        assert longest
        assert longest[0] == "a"
        queue.done("a")
        queue.done("b")
        assert queue.longest_busy() is None

    run(test)
