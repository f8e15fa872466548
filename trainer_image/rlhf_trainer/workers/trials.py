"""Trial of a job's rewards on made-up responses to the first rows of its own data, without any model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_api.job import Job
from rlhf_api.spec.job_spec import RewardTerm
from rlhf_api.spec.judges import Judge
from rlhf_api.spec.verifiers import Code
from rlhf_trainer.errors import NoRowLeftError
from rlhf_trainer.rewards.judge import JudgeClient
from rlhf_trainer.rewards.sample import Sample
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.data import DataWorker
from rlhf_trainer.workers.scoring import UserCode

KEYS: dict[type[Any], str] = {Code: "solution_key", Judge: "reference_key"}
"""Class of what reads columns -> its field that names the column of a right answer, if that is not answer_key."""


def with_first_rows(setting: WorkerSetting, rows: int) -> DataWorker:
    """Return the loaded data of a job, of which the first `rows` rows are read, or all if none of those can be used."""
    data, job = setting.job.spec, setting.job
    short = data.with_sources(lambda each: each.model_copy(update={"limit": min(each.limit or rows, rows)}))
    try:
        return DataWorker(replace(setting, job=job.model_copy(update={"spec": short})), slots=1)
    except NoRowLeftError:
        return DataWorker(setting, slots=1)


def made_samples(
    job: Job, data: DataWorker, rows: int, given: Sequence[tuple[int, str]] = ()
) -> list[tuple[int, str, Sample]]:
    """Return (row of the file, kind, sample) of made-up responses to the first rows.

    They are an empty response, the right answer alone and as the chat template writes it, and those of `given`: (row
    of the file, text).
    """
    found = list[tuple[int, str, Sample]]()
    numbers = [number for reader in data.train.readers for number in reader.numbers]
    for example, number in enumerate(numbers):
        texts = [("empty", ""), *_right(job, data, example)] if example < rows else []
        texts += [("given", text) for row, text in given if row == number]
        for kind, text in texts:
            found.append((number, kind, replace(data.sample(data.train, example, text), row=len(found))))
    return found


def _right(job: Job, data: DataWorker, example: int) -> Iterator[tuple[str, str]]:
    columns = data.train.row(example)
    readers = [reader for _, reader in job.spec.column_readers(job.spec.data.train)]
    answers = [columns.get(getattr(each, KEYS.get(type(each), "answer_key"), None) or "") for each in readers]
    for answer in [each for each in answers if each][:1]:
        text = str(answer[0] if isinstance(answer, list) else answer)
        yield from (("gold", text), ("gold's turn", data.turn(data.train, example, text)))


def try_score(code: UserCode, sample: Sample, among: Sequence[Sample]) -> float | None:
    """Return a response's score; a judge that compares does so with those of `among` that have the same prompt."""
    scores = code.scores([sample], among=among) if isinstance(code, JudgeClient) else code.scores([sample])
    return scores[0].value


def total_of(terms: Mapping[str, RewardTerm], scores: Mapping[str, float | None]) -> float | None:
    """Return the weighted sum of scores by field; None if a part of the reward has no score."""
    weighted = [(term.weight, scores.get(path)) for path, term in terms.items()]
    there = [weight * score for weight, score in weighted if score is not None]
    return sum(there) if len(there) == len(weighted) else None
