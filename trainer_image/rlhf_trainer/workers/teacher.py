"""Frozen teachers: the actor learns their probabilities of tokens (on-policy distillation, arXiv:2306.13649)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_api.job import Job
from rlhf_api.spec.algorithms import Distilling
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.training.model_input import TokenBatch
from rlhf_trainer.types import Batch, Fields, Marks, register
from rlhf_trainer.workers.base import TEXT_FIELDS, WorkerSetting, log_probs_by, text_of
from rlhf_trainer.workers.samples import COLUMNS, from_bytes, real_rows
from rlhf_trainer.workers.scoring import SCORED_ONCE
from rlhf_trainer.workers.teacher_endpoint import TRIED_TOKENS, Text, teacher_clients

TEACHER_TOKENS = "teacher_tokens"
MAX_WHOLE_VOCABULARY = 1024
"""Most tokens of a vocabulary that is compared as a whole: a token of the batch then has 8 bytes for each of them."""


class TeacherWorker:
    """One rank of the teachers: a model of any size with the actor's vocabulary, clients of servers, or both."""

    def __init__(self, setting: WorkerSetting) -> None:
        """setting: of the teacher's model or, if all teachers are on servers, of the actor."""
        self._temperature = setting.job.spec.rollout.temperature
        self._model = setting.frozen(setting.language_model()) if setting.role == "teacher" else None
        self._likeliest = likeliest_of(setting)
        ranks, (count, tokens) = dist.get_world_size(), self._likeliest or (None, len(setting.actors_tokenizer()))
        self._servers = teacher_clients(setting.job, ranks=ranks, count=count, vocabulary=tokens)
        for server in self._servers.values():
            server.ready()
        self._key = getattr(setting.job.spec.algorithm, "teacher_key", None)
        self._asks_here = dist.get_rank() in SCORED_ONCE.holders(setting.layout or ParallelSizes(data=ranks))

    @classmethod
    def change_transfers(cls, marks: Marks, *, setting: WorkerSetting) -> Marks:
        """Declare the field that `compute_log_prob` adds and, for servers, that one of the ranks with a row asks."""
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

        def tokens(found: Tensor, _: Fields) -> Tensor:
            return found

        return self._model.infer(fields, texts, tokens, of_token=(2 * self._likeliest[0],))

    def _rows_by_server(self, batch: Batch) -> dict[str, list[int]]:
        """Return the rows of each server by name; those of no server are the model's."""
        rows: dict[str, list[int]] = {name: [] for name in self._servers}
        for row in real_rows(batch).tolist():
            name = str(from_bytes(batch["columns"][row])[self._key]) if self._key else next(iter(rows))
            if name in rows and batch["response_mask"][row].any():
                rows[name].append(row)
        return rows

    def _ask(self, rows: Mapping[str, Sequence[int]], batch: Batch, found: Tensor) -> None:
        """Write the servers' answers into their rows of the field `found`."""
        for name, numbers in rows.items():
            starts = [int((batch["response_mask"][row] > 0).int().argmax()) for row in numbers]
            lengths = [int(batch["attention_mask"][row].sum()) for row in numbers]
            tokens = [batch["tokens"][row, :length].tolist() for row, length in zip(numbers, lengths, strict=True)]
            texts = [Text(*each) for each in zip(tokens, starts, strict=True)]
            for row, text, values in zip(numbers, texts, self._servers[name].log_probs(texts), strict=True):
                mask = batch["response_mask"][row, text.start : len(text.tokens)] > 0
                found[row, text.start : len(text.tokens)][mask] = values[mask]


def compares_tokens(job: Job) -> bool:
    """Whether the divergence from the teacher is over the vocabulary, not of the sampled tokens."""
    return isinstance(job.spec.algorithm, Distilling) and job.spec.algorithm.divergence != "Sampled"


def likeliest_of(setting: WorkerSetting) -> tuple[int, int] | None:
    """Return (K, M) for the K likeliest among the M tokens of the tokenizer; None if the sampled ones are enough.

    setting: of any model of the job. ConfigError for a vocabulary that is too large to be compared as a whole.
    """
    algorithm = setting.job.spec.algorithm
    if not compares_tokens(setting.job):
        return None
    assert isinstance(algorithm, Distilling)
    tokens = len(setting.actors_tokenizer())
    if algorithm.top_k is None and tokens > MAX_WHOLE_VOCABULARY:
        told = f"is missing, and {tokens:,} tokens are too many to be compared ({MAX_WHOLE_VOCABULARY:,} at most)"
        raise ConfigError(f"{setting.job.name}: spec.algorithm.topK: {told}")
    return min(algorithm.top_k or tokens, tokens), tokens


def try_teachers(setting: WorkerSetting) -> None:
    """Raise the errors of a job's divergence, and of its teachers on servers; setting: of the actor."""
    likeliest, words = likeliest_of(setting), setting.actors_tokenizer()
    count, longest = (likeliest or (None, 0))[0], setting.job.spec.data.max_response_tokens
    tried = max(2, min(TRIED_TOKENS, setting.job.spec.data.max_prompt_tokens + longest, len(words)))
    tokens = [place * (len(words) - 1) // (tried - 1) for place in range(tried)]
    for server in teacher_clients(setting.job, ranks=1, count=count, vocabulary=len(words)).values():
        server.ready()
        server.try_out([words.decode([each]) for each in tokens], tokens)
