"""Worker that decodes an evaluation's responses and collects their rewards and scores by functions and verifiers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from rlhf_api.job import Job
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.protocols import DP_PROTO
from rlhf_trainer.rewards.sample import Score
from rlhf_trainer.types import Batch, register
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.samples import COLUMNS, SAMPLE_FIELDS, real_rows, samples_of
from rlhf_trainer.workers.scoring import UserCode, code_of

SCORED = ("scored_scores", "scored_valid")
"""Fields of the reward; missing if the job has none."""


@dataclass(frozen=True, kw_only=True)
class JudgedRow:
    """Prompt and response of one held-out row as text, with all scores of the response."""

    prompt: str
    response: str
    finished: bool
    response_tokens: int
    scores: dict[str, float | None]
    """Score by measure: `reward`, `cost`, each function, each part of a function, each verifier; None: no score."""


class JudgeWorker:
    """One rank of the worker that decodes and scores the responses of an evaluation."""

    def __init__(self, setting: WorkerSetting) -> None:
        self._tokenizer = setting.tokenizer()
        self._judges = evaluation_code(setting.job, ranks=dist.get_world_size())
        for judge in self._judges.values():
            judge.ready()

    @register(DP_PROTO, reads=SAMPLE_FIELDS, reads_if_there=(*SCORED, "costs", *COLUMNS))
    def judge(self, batch: Batch) -> list[JudgedRow]:
        """Return this rank's rows that are not padding, decoded and scored; `scored_valid` tells which got a reward."""
        samples, real = samples_of(batch, self._tokenizer), real_rows(batch)
        lengths = batch["response_mask"][real].sum(1).long().tolist()
        columns: dict[str, list[float | None]] = {}
        if batch.fields.keys() >= set(SCORED):
            rewards, given = (batch[name][real].tolist() for name in SCORED)
            columns["reward"] = [reward if is_given else None for reward, is_given in zip(rewards, given, strict=True)]
        if "costs" in batch.fields:
            columns["cost"] = batch["costs"][real].tolist()
        for name, judge in self._judges.items():
            columns |= measures_of(name, judge.scores(samples), taken={*columns, *self._judges})
        return [
            JudgedRow(
                prompt=sample.prompt,
                response=sample.response,
                finished=sample.finished,
                response_tokens=lengths[index],
                scores={name: column[index] for name, column in columns.items()},
            )
            for index, sample in enumerate(samples)
        ]


def measures_of(name: str, scores: Sequence[Score], taken: Collection[str]) -> dict[str, list[float | None]]:
    """Return the scores of a function or verifier, and of each part that it names, by measure.

    UserCodeError for a part whose measure is one of `taken`.
    """
    found = {name: [score.value for score in scores]}
    for part in dict.fromkeys(part for score in scores for part in score.parts):
        measure = f"{name}_{part}"
        if measure in taken:
            raise UserCodeError(f"spec.evaluation: {measure} is a measure, and a part of {name} as well")
        found[measure] = [score.parts.get(part) for score in scores]
    return found


def evaluation_code(job: Job, *, ranks: int) -> dict[str, UserCode]:
    """Return the functions and verifiers of a job's evaluation by name; their processes are started.

    ranks: number of ranks of this machine's worker, which share its CPUs.
    """
    evaluation, deadline = job.spec.evaluation, job.spec.training.call_deadline
    if evaluation is None:
        return {}
    path, code = f"{job.name}: spec.evaluation", partial(code_of, ranks=ranks, deadline=deadline)
    functions = {each.name: code(each, path=f"{path}.functions") for each in evaluation.functions}
    return functions | {each.name: code(each, path=f"{path}.verifiers") for each in evaluation.verifiers}
