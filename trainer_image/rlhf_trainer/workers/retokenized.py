"""Responses in the tokens of a model with another tokenizer than the actor's: decoded, put into a template, encoded."""

from collections.abc import Mapping
from typing import Any

import torch

from rlhf_api.job import Job
from rlhf_api.spec.data import Rows
from rlhf_api.spec.job_spec import JobSpec
from rlhf_trainer.data.ragged import Ragged
from rlhf_trainer.data.tokens import Column, Encoder, Ids
from rlhf_trainer.errors import DataError
from rlhf_trainer.types import Batch, Fields
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.samples import real_rows, samples_of


class Retokenized:
    """Rewriter of responses into the token ids of one scoring model with its own tokenizer."""

    def __init__(self, setting: WorkerSetting) -> None:
        self._job, self._path = setting.job, setting.path
        self._own, self._actors = setting.tokenizer(), setting.actors_tokenizer()
        self._rules: Any = {"chat_template": self._job.spec.data.chat_template, "ends": setting.end_tokens(self._own)}
        self._is_of_a_job = setting.model.uri.startswith("job://")
        self._longest = getattr(setting.config(), "max_position_embeddings", None)

    def fields(self, batch: Batch) -> Fields:
        """Return tokens int64, attention_mask, response_mask [B, T] of this rank's rows; padding rows have one token.

        response_mask is 0 everywhere: prompt and response are not distinguished. DataError for a row that the model's
        template refuses, or that is longer than the model reads.
        """
        rows, samples = real_rows(batch).tolist(), samples_of(batch, self._actors)
        prompts = [prompt_of(self._job.spec, sample.columns) for sample in samples]
        found = self.encoded(prompts, [sample.response for sample in samples], [each.finished for each in samples])
        width = max(map(len, found), default=1)
        if self._longest and width > self._longest:
            sample = max(zip(found, samples, strict=True), key=lambda each: len(each[0]))[1]
            raise DataError(f"{self._path}: reads {self._longest} tokens, and {width} are needed for {sample}")
        padding = int(self._own.pad_token_id or 0)
        by_row = dict(zip(rows, found, strict=True))
        tokens, mask = Ragged.of(by_row.get(row) or [padding] for row in range(batch.size)).padded(width, padding)
        device = batch["tokens"].device
        return {
            "tokens": tokens.to(device),
            "attention_mask": mask.to(device),
            "response_mask": torch.zeros_like(mask).to(device),
        }

    def encoded(self, prompts: list[Any], responses: list[str], finished: list[bool]) -> list[Ids]:
        """Return ids of prompts with responses; for a RewardModel job's model, finished responses get an end token."""
        columns = [Column(field=self._path, values=values) for values in (prompts, responses)]
        encoder = Encoder(columns[0], self._own, **self._rules)
        if self._is_of_a_job:
            starts = encoder.prompts()
            ends = encoder.responses(columns[1], starts)
            rows = zip(starts, ends, finished, strict=True)
            found = [start + (end if is_whole else end[:-1]) for start, end, is_whole in rows]
        else:
            found = encoder.written(columns[1])
        for fault in encoder.faults.values():
            raise DataError(f"{self._path}: a prompt {fault.what}")
        return found


def prompt_of(spec: JobSpec, columns: Mapping[str, Any]) -> Any:
    """Return the prompt as written in the data, from the columns that `with_prompts` added."""
    read = [spec.data.train, *([spec.evaluation.data] if spec.evaluation else [])]
    keys = [prompt_key(source) for data in read for source in data.sources("").values()]
    return next(columns[key] for key in keys if columns.get(key) is not None)


def with_prompts(job: Job) -> Job:
    """Return the job with data sources that also give each prompt, as written in the file, as a column."""

    def with_prompt(source: Rows) -> Rows:
        return source.model_copy(update={"columns": tuple(dict.fromkeys([*source.columns, prompt_key(source)]))})

    return job.model_copy(update={"spec": job.spec.with_sources(with_prompt)})


def prompt_key(source: Rows) -> str:
    return source.messages_key or source.prompt_key
