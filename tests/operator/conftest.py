"""Fixtures of the operator's tests."""

import asyncio

import pytest


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that a client would make, which it does not."""
    made: list[float] = []
    real = asyncio.sleep

    async def quick(seconds: float) -> None:
        if seconds > 0.1:
            made.append(seconds)
        await real(min(seconds, 0.002))

    monkeypatch.setattr(asyncio, "sleep", quick)
    return made
