"""Trial of a job's rewards on made-up responses to the first rows of its own data, without any model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_api.job import Job
from rlhf_api.spec.job_spec import RewardTerm
from rlhf_trainer.errors import NoRowLeftError
from rlhf_trainer.rewards.code_tests import unpacked
from rlhf_trainer.rewards.judge import JudgeClient
from rlhf_trainer.rewards.sample import Sample
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.data import DataWorker
from rlhf_trainer.workers.scoring import UserCode

KEYS: Mapping[str, tuple[str, ...]] = {"answer_key": (), "solution_key": ("[",), "reference_key": ()}
"""Field of verifiers and judges that names a column of right answers -> first characters of its JSON lists."""


def with_first_rows(setting: WorkerSetting, rows: int) -> DataWorker:
    """Load the first `rows` rows of a job's data, or all rows if none of the first ones can be used."""
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

    The responses are an empty one, the right answer alone and as the chat template writes it, and the texts of `given`:
    (row of the file, text).
    """
    found = list[tuple[int, str, Sample]]()
    numbers = [(number, reader, place) for reader in data.train.readers for place, number in enumerate(reader.numbers)]
    for example, (number, reader, place) in enumerate(numbers):
        texts = [("given", text) for row, text in given if row == number]
        if example < rows:
            answers = _right_answers(job, reader.rows()[place])
            turns = [("gold's turn", data.turn(data.train, example, each)) for each in answers]
            texts = [("empty", ""), *(("gold", each) for each in answers), *turns, *texts]
        for kind, text in texts:
            found.append((number, kind, replace(data.sample(data.train, example, text), row=len(found))))
    return found


def _right_answers(job: Job, columns: Mapping[str, Any]) -> list[str]:
    """Return the first right answer in a row; an empty list if there is none."""
    readers = [reader for _, reader in job.spec.column_readers(job.spec.data.train)]
    values = [(columns.get(getattr(each, key, None) or ""), lists) for each in readers for key, lists in KEYS.items()]
    found = [unpacked(*value) for value in values]
    return [str(each[0] if isinstance(each, list) else each) for each in found if each not in (None, "", [])][:1]


def try_score(code: UserCode, sample: Sample, among: Sequence[Sample]) -> float | None:
    """Return a response's score; a comparing judge compares it with the responses in `among` to the same prompt."""
    scores = code.scores([sample], among=among) if isinstance(code, JudgeClient) else code.scores([sample])
    return scores[0].value


def total_of(terms: Mapping[str, RewardTerm], scores: Mapping[str, float | None]) -> float | None:
    """Return the weighted sum of scores by field; None if a part of the reward has no score."""
    weighted = [(term.weight, scores.get(path)) for path, term in terms.items()]
    there = [weight * score for weight, score in weighted if score is not None]
    return sum(there, 0.0) if len(there) == len(weighted) else None
