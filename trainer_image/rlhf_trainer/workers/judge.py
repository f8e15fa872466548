"""Decodes the responses of an evaluation and collects their rewards and the scores of the user's functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_api.spec import EvaluationFunction
from rlhf_trainer.protocols import DP_PROTO
from rlhf_trainer.rewards.function import UserFunction
from rlhf_trainer.types import Batch, register
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.samples import SAMPLE_FIELDS, real_rows, samples_of


@dataclass(frozen=True, kw_only=True)
class JudgedRow:
    """One response as text, with all of its scores."""

    prompt: str
    response: str
    finished: bool
    scores: dict[str, float]
    """`reward`, `cost` if there is a cost model, and each evaluation function by its name."""


class JudgeWorker:
    """One rank's part of an evaluation."""

    def __init__(self, setting: WorkerSetting, *, functions: Sequence[EvaluationFunction]) -> None:
        self._tokenizer = setting.tokenizer()
        self._functions = {
            function.name: UserFunction(
                function.entrypoint,
                arguments=function.arguments,
                seconds=function.timeout_seconds,
                deadline=setting.job.spec.training.call_deadline_seconds,
                path="spec.evaluation.functions",
            )
            for function in functions
        }
        for function in self._functions.values():
            function.ready()

    @register(DP_PROTO, reads=("scores", *SAMPLE_FIELDS), reads_if_there=("costs",))
    def judge(self, batch: Batch) -> list[JudgedRow]:
        """This rank's rows that are not padding, decoded and scored."""
        samples, real = samples_of(batch, self._tokenizer), real_rows(batch)
        measured = {"reward": "scores", **({"cost": "costs"} if "costs" in batch.fields else {})}
        columns = {name: batch[field][real].tolist() for name, field in measured.items()}
        columns |= {name: function.scores(samples) for name, function in self._functions.items()}
        return [
            JudgedRow(
                prompt=sample.prompt,
                response=sample.response,
                finished=sample.finished,
                scores={name: column[index] for name, column in columns.items()},
            )
            for index, sample in enumerate(samples)
        ]
