"""Client of a teacher on a vLLM server, which gets token ids and gives the log-probabilities of a prompt's tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_api.job import Job
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.rewards.endpoint import Answer, Endpoint, named

COMPLETIONS = "/completions"
TRIED_TOKENS = 64
"""Most tokens of the trial text; they lie evenly over the vocabulary."""
UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
Places = Sequence[Mapping[str, Mapping[str, Any]] | None]
"""vLLM's `prompt_logprobs`: for each token of a text its own entry and those of the likeliest tokens, by token id."""


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt with its response, of which the response begins at `start`."""

    tokens: list[int]
    start: int

    def __str__(self) -> str:
        return f"{len(self.tokens)} tokens, of which {len(self.tokens) - self.start} are the response"


@dataclass(kw_only=True)
class TeacherClient(Endpoint):
    """Client of one teacher."""

    longest: ClassVar[int] = 2**28

    model: str
    count: int | None
    """Number of likeliest tokens to ask for; None asks for the given tokens only."""
    vocabulary: int
    """Number of tokens of the actor's tokenizer; a server's further ones are left out."""

    def log_probs(self, texts: Sequence[Text]) -> list[Tensor]:
        """Return for each text log-probabilities float32 [n] of the n tokens after its start.

        With `count` K return ids and log-probabilities of the K likeliest tokens instead, as `likeliest_tokens` does.
        Raises EnvironmentProblem if no answer comes, UserCodeError if it is not vLLM's.
        """
        return self.answers([(self._request(text), text) for text in texts], self._log_probs_in)

    def try_out(self, words: Sequence[str], tokens: Sequence[int]) -> None:
        """Ask for the log-probabilities of some tokens; UserCodeError if they are other words to the server."""
        text = Text([*tokens], 1)

        def compare(answer: Answer, about: object) -> None:
            self._log_probs_in(answer, about)
            places = self._places_in(answer, about)
            for token, word, place in zip(tokens, words, places, strict=True):
                there = place[str(token)].get("decoded_token") if place else None
                if there is not None and "\ufffd" not in there + word and there.strip() != word.strip():
                    raise UserCodeError(
                        f"{self.path}: {self.url} has another tokenizer: token {token} is {there!r} there, and "
                        f"{word!r} in the actor's"
                    )

        self.answers([(self._request(text), text)], compare)

    def _request(self, text: Text) -> dict[str, Any]:
        counted = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": self.count or 0}
        return {"model": self.model, "prompt": text.tokens, **counted}

    def _places_in(self, answer: Answer, about: object) -> Places:
        if answer.code != HTTPStatus.OK:
            raise self.refused(f"answered {named(answer.code)}", about)
        try:
            found: Places = json.loads(answer.body)["choices"][0]["prompt_logprobs"]
            assert isinstance(about, Text)
            if len(found) == len(about.tokens):
                return found
        except UNREADABLE:
            pass
        raise self.refused("answered without the prompt_logprobs of each token", about)

    def _log_probs_in(self, answer: Answer, about: object) -> Tensor:
        places = self._places_in(answer, about)
        assert isinstance(about, Text)
        try:
            given = [{int(token): float(each["logprob"]) for token, each in (place or {}).items()} for place in places]
            if self.count is None:
                return torch.tensor([given[at][about.tokens[at]] for at in range(about.start, len(places))])
            return torch.tensor([self._likeliest(each, self.count) for each in given[about.start :]])
        except UNREADABLE:
            told = f"gives fewer than {self.count} likeliest tokens; start it with --max-logprobs {self.count}"
            raise self.refused(told if self.count else "gives no log-probability of a token", about) from None

    def _likeliest(self, given: Mapping[int, float], count: int) -> list[float]:
        """Return ids and log-probabilities of the likeliest tokens; IndexError if there are too few."""
        own = sorted((token for token in given if token < self.vocabulary), key=given.__getitem__, reverse=True)
        chosen = [own[place] for place in range(count)]
        return [*map(float, chosen), *(given[token] for token in chosen)]


def teacher_clients(job: Job, *, ranks: int, count: int | None, vocabulary: int) -> dict[str, TeacherClient]:
    """Return the clients of a job's teachers on servers, by name; `ranks`: ranks that share a server's concurrency."""
    return {
        each.name: TeacherClient(
            url=each.url.rstrip("/") + COMPLETIONS,
            model=each.model,
            seconds=each.timeout_seconds,
            attempts=each.attempts,
            concurrency=max(1, each.concurrency // ranks),
            token_variable=each.token_variable,
            path=f"{job.name}: spec.models.teacherEndpoints.{place}",
            count=count,
            vocabulary=vocabulary,
        )
        for place, each in enumerate(job.spec.models.teacher_endpoints)
    }
