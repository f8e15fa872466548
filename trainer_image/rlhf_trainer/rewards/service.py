"""An HTTP service that scores responses: POST {"prompt", "response", "finished"} and perhaps "columns"."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

import httpx

from rlhf_trainer.errors import EnvironmentProblem, UserCodeError
from rlhf_trainer.rewards.sample import EXPECTED, Sample, Score, is_score

MAX_ANSWER_BYTES = 65536
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""The pause before the second attempt, which doubles for each further one, and the longest."""
RETRYABLE = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
"""Answers besides 5xx after which another attempt is made."""
JSON = {"Content-Type": "application/json"}


class RetryableError(Exception):
    """An attempt failed in a way that another attempt may not; the text says what happened."""


@dataclass(frozen=True, kw_only=True)
class ServiceClient:
    """The address of the service, and limits of the requests to it."""

    url: str
    seconds: float
    """The longest that an attempt may take, from the connection to the last byte."""
    attempts: int
    concurrency: int
    """The most requests of this process at a time."""
    token_variable: str | None
    """Environment variable that holds the bearer token; its value is never shown."""
    path: str
    """The service's field in the manifest, for messages."""

    def ready(self) -> None:
        """EnvironmentProblem if the token is not set or cannot be sent."""
        self._headers()

    def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """A score for each sample.

        EnvironmentProblem if the service does not answer, UserCodeError if it refuses or answers no score; both name
        the sample.
        """
        return [Score(value) for value in asyncio.run(self._scores(samples))]

    def close(self) -> None:
        """Nothing is kept between calls."""

    def _headers(self) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity"}  # so that the limit in bytes is that of the answer as sent
        if self.token_variable is None:
            return headers
        variable = f"{self.path}.tokenVariable: the environment variable {self.token_variable}"
        token = os.environ.get(self.token_variable, "").rstrip("\r\n")  # files end with one
        if not token:
            raise EnvironmentProblem(f"{variable} is not set")
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise EnvironmentProblem(f"{variable} holds characters that a token cannot have")
        return {**headers, "Authorization": f"Bearer {token}"}

    async def _scores(self, samples: Sequence[Sample]) -> list[float]:
        free = asyncio.Semaphore(self.concurrency)
        limits = httpx.Limits(max_connections=self.concurrency)
        async with httpx.AsyncClient(timeout=None, limits=limits, headers=self._headers()) as client:

            async def score(sample: Sample) -> float:
                async with free:
                    return await self._score(client, sample)

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(score(sample)) for sample in samples]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None  # the first one has cancelled the others
        return [task.result() for task in tasks]

    async def _score(self, client: httpx.AsyncClient, sample: Sample) -> float:
        """The score of one sample, after at most `attempts` requests."""
        for attempt in range(1, self.attempts + 1):
            try:
                async with asyncio.timeout(self.seconds):
                    return await self._attempt(client, sample)
            except TimeoutError:
                what = f"did not answer within {self.seconds:g} s"
            except RetryableError as failed:
                what = str(failed)
            if attempt < self.attempts:
                await asyncio.sleep(pause(attempt))
        raise EnvironmentProblem(f"{self.path}: {self.url} {what} ({self.attempts} attempts); the sample is {sample}")

    async def _attempt(self, client: httpx.AsyncClient, sample: Sample) -> float:
        """One request; RetryableError if another may succeed, UserCodeError if none will."""
        request = {"prompt": sample.prompt, "response": sample.response, "finished": sample.finished}
        given = {"columns": sample.columns} if sample.columns else {}
        content = json.dumps({**request, **given}, ensure_ascii=False).encode(errors="replace")
        try:
            async with client.stream("POST", self.url, content=content, headers=JSON) as answer:
                body = await _limited_body(answer)
        except httpx.HTTPError as error:
            raise RetryableError(f"cannot be reached: {type(error).__name__}") from error
        code = answer.status_code
        if code >= HTTPStatus.INTERNAL_SERVER_ERROR or code in RETRYABLE:
            raise RetryableError(f"answered {named(code)}")
        if code != HTTPStatus.OK:
            raise self._nonsense(f"answered {named(code)}", sample)
        if len(body) > MAX_ANSWER_BYTES:
            raise self._nonsense(f"answered more than {MAX_ANSWER_BYTES} bytes", sample)
        score = number_in(body)
        if score is None:  # the answer is not shown, for it may repeat the token
            raise self._nonsense(f'answered something else than {{"score": {EXPECTED}}}', sample)
        return score

    def _nonsense(self, what: str, sample: Sample) -> UserCodeError:
        return UserCodeError(f"{self.path}: {self.url} {what}; the sample is {sample}")


async def _limited_body(answer: httpx.Response) -> bytes:
    """The body of an answer; reading stops once it is longer than MAX_ANSWER_BYTES."""
    body = bytearray()
    async for part in answer.aiter_raw():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            break
    return bytes(body)


def pause(attempt: int) -> float:
    """Seconds to wait after a failed attempt (from 1): exponential backoff with jitter, as all ranks may retry."""
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)


def number_in(body: bytes) -> float | None:
    """The number of an answer {"score": number}, finite as float32; None for anything else."""
    try:
        score = json.loads(body)["score"]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    return float(score) if is_number and is_score(score) else None


def named(code: int) -> str:
    """`404 Not Found`: the standard phrase, not the server's."""
    known = {int(status): status.phrase for status in HTTPStatus}
    return f"{code} {known.get(code, '')}".rstrip()
