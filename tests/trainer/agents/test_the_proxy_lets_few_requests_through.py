"""Requests that the proxy refuses cost the engine's thread nothing, and no request is left without a reply."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest

from rlhf_trainer.agents.openai_format import CHAT
from rlhf_trainer.agents.proxy import MAX_PENDING, Proxy
from tests.patience import PATIENCE_SECONDS

BODY = {"messages": [], "model": "policy"}
PATHS = "/v1/chat/completions, /v1/completions, /v1/reward"


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy(requests=3)
    yield made
    made.close()


def send(proxy: Proxy, key: str, path: str = CHAT, data: Any = None, method: str = "POST") -> tuple[int, Any]:
    """Status and JSON of the answer to one request."""

    async def exchange() -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        url = proxy.url.removesuffix("/v1") + path
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, data=data or json.dumps(BODY), headers=headers) as answer,
        ):
            return answer.status, await answer.json()

    return asyncio.run(asyncio.wait_for(exchange(), PATIENCE_SECONDS))


def sentence_of(found: tuple[int, Mapping[str, Any]]) -> str:
    return f"{found[0]} {found[1]['error']['message']}"


@pytest.mark.parametrize(
    ("path", "method", "sentence"),
    [
        ("/v1/responses", "POST", f"404 there is no /v1/responses, expected {PATHS}"),
        ("/", "POST", f"404 there is no /, expected {PATHS}"),
        ("/v1/reward", "DELETE", f"404 there is no /v1/reward, expected {PATHS}"),
    ],
)
def test_another_path_is_a_sentence_and_counted(proxy: Proxy, path: str, method: str, sentence: str) -> None:
    key = proxy.open()
    assert sentence_of(send(proxy, key, path, method=method)) == sentence
    assert proxy.forget(key) == 1


def test_an_unknown_key_leaves_nothing_behind(proxy: Proxy) -> None:
    assert sentence_of(send(proxy, "unknown")) == "401 the key is that of no running episode"
    assert not proxy._episodes


def test_requests_are_limited_however_bad_they_are(proxy: Proxy) -> None:
    key = proxy.open()
    assert [send(proxy, key, data="[1]")[0] for _ in range(3)] == [400] * 3
    assert sentence_of(send(proxy, key)) == "403 the episode has had its 3 requests, refused ones among them"
    assert not proxy.received(seconds=0)
    assert proxy.forget(key) == 4


def test_an_ended_episode_answers_what_is_open(proxy: Proxy) -> None:
    key, other = proxy.open(), proxy.open()
    with ThreadPoolExecutor() as pool:
        open_ = [pool.submit(send, proxy, key) for _ in range(2)]
        stays = pool.submit(send, proxy, other)
        found: list[Any] = []
        while len(found) < 3:
            found += [pending for pending, _ in proxy.received(seconds=PATIENCE_SECONDS)]
        proxy.forget(key)
        assert [each.result(PATIENCE_SECONDS)[0] for each in open_] == [401, 401]
        next(each for each in found if each.key == other).reply({})
        assert stays.result(PATIENCE_SECONDS) == (200, {})


def half_sent(proxy: Proxy, key: str) -> socket.socket:
    """The connection of a request whose body has one byte of two."""
    host, port = proxy.url.removeprefix("http://").removesuffix("/v1").split(":")
    connection = socket.create_connection((host, int(port)), PATIENCE_SECONDS)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 2\r\n\r\n"
    connection.sendall(head.encode() + b"{")
    return connection


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_SECONDS
    while not holds() and time.monotonic() < limit:
        time.sleep(0.005)


def test_bodies_that_do_not_come_count_as_under_way() -> None:
    proxy = Proxy(requests=10**6)
    key = proxy.open()
    connections = [half_sent(proxy, key) for _ in range(MAX_PENDING)]
    until(lambda: proxy._episodes[key].under_way == MAX_PENDING)
    found = send(proxy, key, data="[1]")
    for each in connections:
        each.close()
    proxy.close()
    assert sentence_of(found) == f"429 {MAX_PENDING} requests of the episode wait for their answers"


def test_a_body_that_comes_after_the_end_is_refused(proxy: Proxy) -> None:
    key = proxy.open()
    with half_sent(proxy, key) as connection:
        until(lambda: proxy._episodes[key].read == 1)
        proxy.forget(key)
        connection.sendall(b"}")
        assert connection.recv(12) == b"HTTP/1.1 401"
    assert not proxy.received(seconds=0)
