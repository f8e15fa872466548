"""Requests to HTTP servers: a POST of JSON with limits of time and length, and many requests at a time."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import httpx

T = TypeVar("T")


class NoAnswerError(Exception):
    """Error of a request without an answer; the text is a predicate, such as `did not answer within 3 s`."""


class Answer(NamedTuple):
    """Answer of an HTTP server: status, body (cut off once it is longer than the limit) and header Retry-After."""

    code: int
    body: bytes
    retry_after: str


async def post(
    client: httpx.AsyncClient, url: str, content: Any, *, seconds: float | None, longest: int | None = None
) -> Answer:
    """Post `content` as JSON; NoAnswerError unless a whole answer comes.

    seconds: time limit from the connection to the last byte; longest: bytes after which the body is not read on.
    """
    sent = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}  # the limit is of sent bytes
    try:
        async with asyncio.timeout(seconds), client.stream("POST", url, content=sent, headers=headers) as answer:
            body = await _body_of(answer, longest)
    except TimeoutError:
        raise NoAnswerError(f"did not answer within {seconds:g} s") from None
    except httpx.HTTPError as error:
        raise NoAnswerError(f"cannot be reached: {type(error).__name__}") from error
    return Answer(answer.status_code, body, answer.headers.get("Retry-After", ""))


async def _body_of(answer: httpx.Response, longest: int | None) -> bytes:
    body = bytearray()
    async for part in answer.aiter_raw():
        body += part
        if longest is not None and len(body) > longest:
            break
    return bytes(body)


async def gather(calls: Iterable[Callable[[], Awaitable[T]]], *, concurrency: int) -> list[T]:
    """Return the calls' results in order, at most `concurrency` at a time; the first error cancels the other calls."""
    free = asyncio.Semaphore(concurrency)

    async def limited(call: Callable[[], Awaitable[T]]) -> T:
        async with free:
            return await call()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(limited(call)) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def named(code: int) -> str:
    """Return an HTTP status with its standard phrase, not the server's, such as `404 Not Found`."""
    return f"{code} {httpx.codes.get_reason_phrase(code)}".rstrip()
