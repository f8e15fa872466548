"""Requests to an HTTP service: many at a time, each with retries, and limits on the answers."""

import asyncio
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, Generic, TypeVar

import httpx

from rlhf_api.spec.functions import RewardService
from rlhf_api.spec.judges import Judge, TeacherEndpoint
from rlhf_trainer.errors import EnvironmentProblem, UserCodeError
from rlhf_trainer.http_client import Answer, NoAnswerError, gather, named, post
from rlhf_trainer.rewards.sample import EXPECTED, Sample, Score, is_score

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""Pause in seconds before a request's second attempt, doubled for each later attempt, and the longest pause."""
RETRYABLE = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
"""HTTP statuses besides 5xx after which a request is retried."""
T = TypeVar("T")
Settings = TypeVar("Settings", RewardService, Judge, TeacherEndpoint)


@dataclass(kw_only=True)
class Endpoint(Generic[Settings]):
    """Address of an HTTP service, and limits of the requests to it."""

    longest: ClassVar[int] = 65536
    """Most bytes of an answer's body; the rest of a longer body is not read."""

    url: str
    settings: Settings
    """The service in the manifest. The token in its `token_variable` is never shown."""
    ranks: int
    """Number of ranks that share the service's concurrency, each with at least one request at a time."""
    path: str
    """The service's field in the manifest, for error messages."""

    def ready(self) -> None:
        """Check the bearer token; EnvironmentProblem if its variable is not set, or holds invalid characters."""
        self._headers()

    def close(self) -> None:
        """Do nothing, as the connections to the service are closed at the end of each call of `answers`."""

    def answers(self, requests: Sequence[tuple[Any, object]], read: Callable[[Answer, object], T]) -> list[T]:
        """Send requests (JSON, sample for errors); returns read(answer, sample) of each. Raises EnvironmentProblem."""
        return asyncio.run(self._answers(requests, read))

    def refused(self, what: str, about: object) -> UserCodeError:
        """Return the error for an unusable answer of the service; about: the sample in question."""
        return UserCodeError(f"{self.path}: {self.url} {what}; the sample is {about}")

    def _headers(self) -> dict[str, str]:
        if (name := self.settings.token_variable) is None:
            return {}
        variable = f"{self.path}.tokenVariable: the environment variable {name}"
        token = os.environ.get(name, "").rstrip("\r\n")  # files end with a line break
        if not token:
            raise EnvironmentProblem(f"{variable} is not set")
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise EnvironmentProblem(f"{variable} holds characters that a token cannot have")
        return {"Authorization": f"Bearer {token}"}

    async def _answers(self, requests: Sequence[tuple[Any, object]], read: Callable[[Answer, object], T]) -> list[T]:
        concurrency = max(1, self.settings.concurrency // self.ranks)
        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(timeout=None, limits=limits, headers=self._headers()) as client:

            async def ask(request: Any, about: object) -> T:
                return read(await self._answer(client, request, about), about)

            return await gather([partial(ask, *each) for each in requests], concurrency=concurrency)

    async def _answer(self, client: httpx.AsyncClient, request: Any, about: object) -> Answer:
        """Send a request up to `attempts` times, with growing pauses; return the answer. Raises EnvironmentProblem."""
        seconds, attempts = self.settings.timeout_seconds, self.settings.attempts
        for attempt in range(1, attempts + 1):
            try:
                answer = await post(client, self.url, request, seconds=seconds, longest=self.longest)
            except NoAnswerError as error:
                what, wait = str(error), 0.0
            else:
                if answer.code < HTTPStatus.INTERNAL_SERVER_ERROR and answer.code not in RETRYABLE:
                    return answer
                what, wait = f"answered {named(answer.code)}", retry_after(answer.retry_after)
            if attempt < attempts:
                await asyncio.sleep(max(pause(attempt), wait))
        raise EnvironmentProblem(f"{self.path}: {self.url} {what} ({attempts} attempts); the sample is {about}")


class ServiceClient(Endpoint[RewardService]):
    """Client of a service that scores responses: POST {"prompt", "response", "finished"} and perhaps "columns"."""

    def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """Return a score for each sample. EnvironmentProblem if no answer comes, UserCodeError if it is bad."""
        return self.answers([(_request(sample), sample) for sample in samples], self._score)

    def _score(self, answer: Answer, about: object) -> Score:
        if answer.code != HTTPStatus.OK:
            raise self.refused(f"answered {named(answer.code)}", about)
        if len(answer.body) > self.longest:
            raise self.refused(f"answered more than {self.longest} bytes", about)
        try:
            score = json.loads(answer.body)["score"]
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            score = None
        is_number = isinstance(score, int | float) and not isinstance(score, bool)
        if not is_number or not is_score(score):  # the message does not show the answer, which may repeat the token
            raise self.refused(f'answered something else than {{"score": {EXPECTED}}}', about)
        return Score(float(score))


def _request(sample: Sample) -> dict[str, object]:
    request = {"prompt": sample.prompt, "response": sample.response, "finished": sample.finished}
    return {**request, "columns": sample.columns} if sample.columns else {**request}


def pause(attempt: int) -> float:
    """Return the seconds to wait after the failed attempt of this number (from 1): exponential backoff with jitter."""
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)


def retry_after(header: str) -> float:
    """Return the seconds of a Retry-After header, up to the longest pause; 0 for none, or for a date."""
    return min(LONGEST_PAUSE_SECONDS, float(header)) if header.isascii() and header.isdigit() else 0.0
