"""Credentials that end: they are read again where they came from."""

import asyncio
from pathlib import Path

import pytest

from rlhf_operator.cluster.client import ApiError
from tests.operator.test_writes_to_a_failing_server import Parts, run


def test_a_new_token_is_taken_when_the_old_is_refused(tmp_path: Path, pauses: list[float]) -> None:
    async def test(parts: Parts) -> None:
        config = tmp_path / "kubeconfig"
        for number in range(3):
            parts.server.will("GET", "/x", 401)
            before = f"token-{number - 1}" if number else "secret"
            config.write_text(config.read_text().replace(before, f"token-{number}"))
            assert await parts.client.call("GET", "/x", kind="x") == {}
        assert parts.server.tokens == ["secret", "token-0", "token-0", "token-1", "token-1", "token-2"]
        assert len(pauses) == 3

    run(tmp_path, test)


def test_credentials_that_stay_refused_are_an_error(tmp_path: Path, pauses: list[float]) -> None:
    async def test(parts: Parts) -> None:
        for _ in range(5):
            parts.server.will("GET", "/x", 401, {"message": "who are you"})
        with pytest.raises(ApiError, match="401: who are you"):
            await parts.client.call("GET", "/x", kind="x")
        assert len(pauses) == 4

    run(tmp_path, test)


def test_refusals_together_renew_credentials_once(
    tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(parts: Parts) -> None:
        renew, renewals = parts.client.renew_credentials, 0

        async def counted() -> None:
            nonlocal renewals
            renewals += 1
            await renew()

        monkeypatch.setattr(parts.client, "renew_credentials", counted)
        for _ in range(8):
            parts.server.will("GET", "/x", 401)
        answers = await asyncio.gather(*(parts.client.call("GET", "/x", kind="x") for _ in range(8)))
        assert answers == [{}] * 8
        assert renewals == 1
        assert len(pauses) == 8

    run(tmp_path, test)
