"""Frozen teachers: the actor learns their probabilities of tokens (on-policy distillation, arXiv:2306.13649).

A teacher on a server is a vLLM server: it gets token ids and gives the log-probabilities of a prompt's tokens.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from math import isfinite
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_api.job import Job
from rlhf_api.spec.algorithms import Distilling
from rlhf_api.spec.judges import TeacherEndpoint
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import ConfigError, UserCodeError
from rlhf_trainer.http_client import Answer, named
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.rewards.endpoint import Endpoint
from rlhf_trainer.training.model_input import TokenBatch
from rlhf_trainer.types import Batch, Fields, Marks, register
from rlhf_trainer.workers.base import TEXT_FIELDS, WorkerSetting, log_probs_by, text_of
from rlhf_trainer.workers.samples import COLUMNS, from_bytes, real_rows
from rlhf_trainer.workers.scoring import SCORED_ONCE

TEACHER_TOKENS = "teacher_tokens"
TRIED_TOKENS = 64
"""Most tokens on which a server is tried; they lie evenly over the vocabulary."""
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
Places = Sequence[Mapping[str, Mapping[str, Any]] | None]
"""vLLM's `prompt_logprobs`: for each token of a text its own entry and those of the likeliest tokens, by token id."""
MAX_WHOLE_VOCABULARY = 1024
"""Largest vocabulary that is compared whole: each token of the batch then takes 8 bytes per vocabulary entry."""


@dataclass(frozen=True)
class TeacherText:
    """Token ids of a prompt and its response; the response begins at the index `start`."""

    tokens: list[int]
    start: int

    def __str__(self) -> str:
        return f"{len(self.tokens)} tokens, of which {len(self.tokens) - self.start} are the response"


@dataclass(kw_only=True)
class TeacherClient(Endpoint[TeacherEndpoint]):
    """Client of one teacher, a vLLM server."""

    longest: ClassVar[int] = 2**28

    count: int
    """Number of likeliest tokens to ask for; 0: only the tokens of the texts."""
    vocabulary: int
    """Number of tokens of the actor's tokenizer; further tokens of a server are left out."""

    def log_probs(self, texts: Sequence[TeacherText]) -> list[Tensor]:
        """Return for each text log-probabilities float32 [n] of the n tokens after its start.

        With `count` K return ids and log-probabilities of the K likeliest tokens instead, as `likeliest_tokens` does.
        Raises EnvironmentProblem if no answer comes, UserCodeError if the answer is not in vLLM's form.
        """
        return [self._log_probs_of(text, places) for text, places in zip(texts, self._places(texts), strict=True)]

    def require_words(self, words: Mapping[int, str]) -> None:
        """Raise UserCodeError if the server decodes a token to another text than `words` (id -> text)."""
        text = TeacherText([*words], 1)
        (places,) = self._places([text])
        self._log_probs_of(text, places)
        for (token, word), place in zip(words.items(), places, strict=True):
            there = place.get(str(token), {}).get("decoded_token") if place else None
            if there is not None and "\ufffd" not in there + word and there.strip() != word.strip():
                problem = f"has another tokenizer: token {token} is {there!r} there, and {word!r} in the actor's"
                raise UserCodeError(f"{self.path}: {self.url} {problem}")

    def _places(self, texts: Sequence[TeacherText]) -> list[Places]:
        options = {"model": self.settings.model, "max_tokens": 1, "temperature": 0, "prompt_logprobs": self.count}
        return self.answers([({**options, "prompt": text.tokens}, text) for text in texts], self._places_in)

    def _places_in(self, answer: Answer, about: object) -> Places:
        if answer.code != HTTPStatus.OK:
            hint = f"; it may need --max-logprobs {self.count} or a larger --max-model-len"
            raise self.refused(f"answered {named(answer.code)}{hint * (answer.code == HTTPStatus.BAD_REQUEST)}", about)
        with suppress(*UNREADABLE):
            found: Places = json.loads(answer.body)["choices"][0]["prompt_logprobs"]
            if isinstance(about, TeacherText) and len(found) == len(about.tokens):
                return found
        raise self.refused("answered without the prompt_logprobs of each token", about)

    def _log_probs_of(self, text: TeacherText, places: Places) -> Tensor:
        with suppress(*UNREADABLE):
            given = [
                {
                    int(token): found
                    for token, each in (place or {}).items()
                    if isfinite(found := float(each["logprob"]))
                }
                for place in places
            ]
            if self.count:
                return torch.tensor([self._likeliest(each) for each in given[text.start :]])
            return torch.tensor([given[at][text.tokens[at]] for at in range(text.start, len(places))])
        lacking = f"fewer than {self.count} likeliest tokens" if self.count else "no log-probability of a token"
        raise self.refused(f"gives {lacking}", text)

    def _likeliest(self, given: Mapping[int, float]) -> list[float]:
        """Return ids and log-probabilities of the likeliest tokens; IndexError if there are too few."""
        own = sorted((token for token in given if token < self.vocabulary), key=given.__getitem__, reverse=True)
        chosen = [own[place] for place in range(self.count)]
        return [*map(float, chosen), *(given[token] for token in chosen)]


def teacher_clients(job: Job, *, ranks: int, count: int, vocabulary: int) -> dict[str, TeacherClient]:
    """Return the clients of a job's teachers on servers, by name; `ranks`: ranks that share a server's concurrency."""
    found = dict[str, TeacherClient]()
    for place, each in enumerate(job.spec.models.teacher_endpoints):
        url, path = each.url.rstrip("/") + "/completions", f"{job.name}: spec.models.teacherEndpoints.{place}"
        sizes = {"count": count, "vocabulary": vocabulary}
        found[each.name] = TeacherClient(url=url, settings=each, ranks=ranks, path=path, **sizes)
    return found


class TeacherWorker:
    """One rank of the teachers: a model of any size with the actor's vocabulary, clients of servers, or both."""

    def __init__(self, setting: WorkerSetting) -> None:
        """setting: of the teacher's model or, if all teachers are on servers, of the actor."""
        self._temperature = setting.job.spec.rollout.temperature
        self._model = setting.frozen(setting.language_model()) if setting.role == "teacher" else None
        self._likeliest = likeliest_of(setting)
        ranks, (count, tokens) = dist.get_world_size(), self._likeliest or (0, 0)
        self._servers = teacher_clients(setting.job, ranks=ranks, count=count, vocabulary=tokens)
        for server in self._servers.values():
            server.ready()
        self._key = getattr(setting.job.spec.algorithm, "teacher_key", None)
        self._asks_here = dist.get_rank() in SCORED_ONCE.holders(setting.layout or ParallelSizes(data=ranks))

    @classmethod
    def change_transfers(cls, marks: Marks, *, setting: WorkerSetting) -> Marks:
        """Declare the field that `compute_log_prob` adds; with servers, one of the ranks that hold a row asks them."""
        adds = (TEACHER_TOKENS if compares_tokens(setting.job) else "teacher_log_probs",)
        changed = replace(marks["compute_log_prob"], adds=adds)
        if setting.job.spec.models.teacher_endpoints:
            reads = (*TEXT_FIELDS, "valid")
            changed = replace(changed, protocol=SCORED_ONCE, reads=reads, reads_if_there=COLUMNS, row_by_row=False)
        return {"compute_log_prob": changed}

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=(), phase="scoring", row_by_row=True)
    def compute_log_prob(self, batch: Batch) -> Fields:
        """Return teacher_log_probs float32 [B, T] of the response tokens, at the temperature of the rollout.

        For a divergence over the vocabulary return teacher_tokens float32 [B, T, 2K] instead: ids and log-probabilities
        of the K likeliest tokens at each place of the response.
        """
        name = "teacher_log_probs" if self._likeliest is None else TEACHER_TOKENS
        if not self._servers:
            return {name: self._by_model({each: batch[each] for each in TEXT_FIELDS}, batch)}
        rows = self._rows_by_server(batch)
        elsewhere = torch.tensor([row for each in rows.values() for row in each], dtype=torch.int64)
        if self._model is None:
            width = () if self._likeliest is None else (2 * self._likeliest[0],)
            found = torch.zeros(*batch["tokens"].shape, *width)
        else:
            left = {each: batch[each].index_fill(0, elsewhere, 0) for each in TEXT_FIELDS}
            found = self._by_model(left, batch)
        if self._asks_here:
            self._ask(rows, batch, found)
        return {name: found}

    def _by_model(self, fields: Fields, batch: Batch) -> Tensor:
        """Return the field of `compute_log_prob` by the model of this rank; rows without text are zero."""
        assert self._model is not None
        if self._likeliest is None:
            return log_probs_by(self._model, batch.with_fields(fields), temperature=self._temperature)

        def texts(micro: Fields) -> list[TokenBatch]:
            return [replace(text_of(micro, temperature=self._temperature), likeliest=self._likeliest)]

        return self._model.infer(fields, texts, lambda found, _: found, of_token=(2 * self._likeliest[0],))

    def _rows_by_server(self, batch: Batch) -> dict[str, list[int]]:
        """Return the rows that each server scores, by the server's name; the model scores all other rows."""
        rows: dict[str, list[int]] = {name: [] for name in self._servers}
        for row in real_rows(batch).tolist():
            name = str(from_bytes(batch["columns"][row])[self._key]) if self._key else next(iter(rows))
            if name in rows and batch["response_mask"][row].any():
                rows[name].append(row)
        return rows

    def _ask(self, rows: Mapping[str, Sequence[int]], batch: Batch, found: Tensor) -> None:
        """Write the servers' answers into their rows of the field `found`."""
        starts = (batch["response_mask"] > 0).int().argmax(1).tolist()
        lengths = batch["attention_mask"].sum(1).long().tolist()
        for name, numbers in rows.items():
            texts = [TeacherText(batch["tokens"][row, : lengths[row]].tolist(), starts[row]) for row in numbers]
            for row, values in zip(numbers, self._servers[name].log_probs(texts), strict=True):
                found[row, starts[row] : lengths[row]] = values


def compares_tokens(job: Job) -> bool:
    """Whether the divergence from the teacher is over the vocabulary, not over the sampled tokens only."""
    return isinstance(job.spec.algorithm, Distilling) and job.spec.algorithm.divergence != "Sampled"


def likeliest_of(setting: WorkerSetting) -> tuple[int, int] | None:
    """Return (K, M) for the K likeliest among the M tokens of the tokenizer; None for the sampled tokens only.

    setting: of any model of the job. ConfigError for a vocabulary that is too large to be compared as a whole.
    """
    algorithm = setting.job.spec.algorithm
    if not compares_tokens(setting.job):
        return None
    assert isinstance(algorithm, Distilling)
    tokens = len(setting.actors_tokenizer())
    if algorithm.top_k is None and tokens > MAX_WHOLE_VOCABULARY:
        problem = f"is missing, and {tokens:,} tokens are too many to be compared ({MAX_WHOLE_VOCABULARY:,} at most)"
        raise ConfigError(f"{setting.job.name}: spec.algorithm.topK: {problem}")
    return min(algorithm.top_k or tokens, tokens), tokens


def try_teachers(setting: WorkerSetting) -> None:
    """Raise ConfigError if the vocabulary is too large, or the error of a teacher's server; setting: of the actor."""
    likeliest, tokenizer, data = likeliest_of(setting), setting.actors_tokenizer(), setting.job.spec.data
    count, tokens = likeliest or (0, len(tokenizer))
    tried = max(2, min(TRIED_TOKENS, data.max_prompt_tokens + data.max_response_tokens, tokens))
    words = {each: tokenizer.decode([each]) for each in (place * (tokens - 1) // (tried - 1) for place in range(tried))}
    for server in teacher_clients(setting.job, ranks=1, count=count, vocabulary=tokens).values():
        server.ready()
        server.require_words(words)
