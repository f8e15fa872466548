"""Decodes the responses of an evaluation and collects their rewards and the scores of the user's functions."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_api.job import Job
from rlhf_trainer.protocols import DP_PROTO
from rlhf_trainer.rewards.function import UserFunction
from rlhf_trainer.types import Batch, register
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.samples import COLUMNS, SAMPLE_FIELDS, real_rows, samples_of


@dataclass(frozen=True, kw_only=True)
class JudgedRow:
    """One response as text, with all of its scores."""

    prompt: str
    response: str
    finished: bool
    scores: dict[str, float | None]
    """`reward`, `cost` if there is a cost model, and each evaluation function and its parts; None: no score."""


class JudgeWorker:
    """One rank's part of an evaluation."""

    def __init__(self, setting: WorkerSetting) -> None:
        self._tokenizer = setting.tokenizer()
        self._functions = evaluation_functions(setting.job)
        for function in self._functions.values():
            function.ready()

    @register(DP_PROTO, reads=("scored_scores", "scored_valid", *SAMPLE_FIELDS), reads_if_there=("costs", *COLUMNS))
    def judge(self, batch: Batch) -> list[JudgedRow]:
        """This rank's rows that are not padding, decoded and scored; `scored_valid` tells which got a reward."""
        samples, real = samples_of(batch, self._tokenizer), real_rows(batch)
        rewards, given = (batch[name][real].tolist() for name in ("scored_scores", "scored_valid"))
        columns: dict[str, list[float | None]] = {
            "reward": [reward if is_given else None for reward, is_given in zip(rewards, given, strict=True)]
        }
        if "costs" in batch.fields:
            columns["cost"] = batch["costs"][real].tolist()
        for name, function in self._functions.items():
            scores = function.scores(samples)
            columns[name] = [score.value for score in scores]
            for part in dict.fromkeys(part for score in scores for part in score.parts):
                columns[f"{name}_{part}"] = [score.parts.get(part) for score in scores]
        return [
            JudgedRow(
                prompt=sample.prompt,
                response=sample.response,
                finished=sample.finished,
                scores={name: column[index] for name, column in columns.items()},
            )
            for index, sample in enumerate(samples)
        ]


def evaluation_functions(job: Job) -> dict[str, UserFunction]:
    """The functions that judge a job's responses, by name; their processes are started."""
    return {
        function.name: UserFunction(
            function.entrypoint,
            arguments=function.arguments,
            seconds=function.timeout_seconds,
            deadline=job.spec.training.call_deadline_seconds,
            path=f"{job.name}: spec.evaluation.functions",
        )
        for function in (job.spec.evaluation.functions if job.spec.evaluation else ())
    }
