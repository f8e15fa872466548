"""Workers that score responses: by a reward other than a single model, and by all measures of an evaluation.

This reward is a function, verifier, service or judge, or a weighted sum of these and at most one model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_api.job import Job
from rlhf_api.spec.algorithms import RewardShaping
from rlhf_api.spec.functions import Function, RewardService
from rlhf_api.spec.job_spec import Model, RewardSum, RewardTerm
from rlhf_api.spec.judges import RewardJudge
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_api.spec.verifiers import Code, RewardVerifier
from rlhf_trainer.errors import EnvironmentProblem, UserCodeError
from rlhf_trainer.ops.masks import WHITEN_EPS, row_sums
from rlhf_trainer.ops.running import RunningMoments
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL, THREE_D_PROTO
from rlhf_trainer.rewards.endpoint import ServiceClient
from rlhf_trainer.rewards.function import UserFunction
from rlhf_trainer.rewards.judge import JudgeClient
from rlhf_trainer.rewards.sample import LOST, STOPPED, UNSERVED, Sample, Score
from rlhf_trainer.rewards.sandboxes import Sandboxes
from rlhf_trainer.rewards.verifiers import OPTIONS
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.types import PARENTS, Batch, Fields, Marks, register
from rlhf_trainer.workers.base import WorkerSetting, with_step
from rlhf_trainer.workers.reward import RewardWorker
from rlhf_trainer.workers.samples import COLUMNS, SAMPLE_FIELDS, TURN_FIELDS, as_bytes, real_rows, samples_of

COMPLETIONS = "/chat/completions"
VERIFIERS, IN_SANDBOXES = "rlhf_trainer.rewards.verifiers:score", "rlhf_trainer.rewards.code_in_sandboxes:score"
MARKS: Mapping[str, str] = {
    STOPPED: "responses took too long to judge, and count as wrong",
    LOST: "sandboxes were lost",
    UNSERVED: "responses found no sandbox in time, and are left out",
}
"""Name of a count in a verifier's result -> words of the warning about the counted responses."""
SCORED_ONCE = replace(
    THREE_D_PROTO, holders=lambda layout: frozenset(rank for ranks in THREE_D_PROTO.collect(layout) for rank in ranks)
)
"""Protocol in which one rank of those with the same rows calls the user's code; the other ranks fetch the output."""
UserCode = UserFunction | ServiceClient | JudgeClient
"""Function or verifier, service or judge that scores responses."""


class ScoringWorker:
    """One rank of the worker that scores responses; a function's process lives as long as the worker."""

    def __init__(self, setting: WorkerSetting) -> None:
        """setting: of the model in the reward, if the reward has one, else of any model with the actor's tokenizer."""
        self._tokenizer, self._terms = setting.actors_tokenizer(), terms_of(setting.job)
        # started first, so that functions import their modules while the model is loaded
        sandboxes = Sandboxes.of(setting.job.spec.sandbox, sharers=dist.get_world_size())
        self._code = reward_code(setting.job, ranks=dist.get_world_size(), sandboxes=sandboxes)
        self._shaping = getattr(setting.job.spec.algorithm, "rewards", RewardShaping())
        self._moments: dict[str, RunningMoments] = {}
        self._model = RewardWorker(setting) if len(self._code) < len(self._terms) else None
        layout = setting.layout or ParallelSizes(data=dist.get_world_size())
        self.parts: dict[str, Numbers] = {}
        """Unweighted scores of the last call, by part of the reward; functions may name further parts."""
        self._notes_parts = has_noted_parts(setting.job)
        self._scores_here = dist.get_rank() in SCORED_ONCE.holders(layout)
        for code in self._code.values():
            code.ready()

    @classmethod
    def change_transfers(cls, marks: Marks, *, setting: WorkerSetting, **_: object) -> Marks:
        """Declare that `compute_reward` adds the reward's parts too, if the job writes rows to a file."""
        scoring = marks["compute_reward"]
        assert scoring.adds is not None
        noted = ("reward_parts",) if has_noted_parts(setting.job) else ()
        return {**marks, "compute_reward": replace(scoring, adds=(*scoring.adds, *noted))}

    @register(ONE_TO_ALL)
    def counters(self) -> dict[str, Any]:
        """Return the worker's state for a checkpoint: JSON values, the same on every rank."""
        return {name: asdict(moments) for name, moments in self._moments.items()}

    @register(ONE_TO_ALL)
    def set_counters(self, *, counters: Mapping[str, Any]) -> None:
        """Restore the worker's state from a checkpoint, as `counters` returned it."""
        self._moments = {name: RunningMoments(**moments) for name, moments in counters.items()}

    @register(
        SCORED_ONCE,
        reads=(*SAMPLE_FIELDS, "sampled"),
        reads_if_there=(PARENTS, *COLUMNS, *TURN_FIELDS),
        adds=("scores", "valid", "response_mask"),
        phase="scoring",
    )
    def compute_reward(self, batch: Batch) -> Fields:
        """Return scores float32 [B]: the environment's reward plus the weighted sum of the parts; 0 on padding.

        A response that lacks the score of a part becomes padding, and so does an episode whose environment failed:
        valid [B] and response_mask [B, T] are 0. A job that writes rows to a file also gets reward_parts uint8 [B, C]:
        `parts` as JSON. For responses of training that were cut off, see `rewards.truncated`.
        """
        total, valid, self.parts = torch.zeros(batch.size), batch["valid"], {}
        if "turn_rewards" in batch.fields:
            total = row_sums(batch["turn_rewards"], batch["response_mask"])
            batch = batch.with_fields({"valid": valid * batch["played"]})
        kept, samples = batch["valid"], samples_of(batch, self._tokenizer)
        for path, term in self._terms.items():
            part = self._part(path, batch, samples)
            total = total + term.weight * self._normalized(term, part, batch)
            kept = kept * part.given
            if len(self._terms) > 1:
                self._measure(term.name, part, batch)
        cut = (1.0 - batch["finished"]) * batch["sampled"] * float(batch.step > 0)
        if self._shaping.truncated == "Value":
            total = torch.where(cut > 0, self._shaping.truncated_value, total)
        kept = kept * (1.0 - cut) if self._shaping.truncated == "Mask" else kept
        recorder.add("reward/left_out", float(((valid - kept) * batch["sampled"]).sum()))
        fields = {"scores": total * kept, "valid": kept, "response_mask": batch["response_mask"] * kept[:, None]}
        if self._notes_parts:
            parts, rows = self.parts.items(), range(batch.size)
            noted = [{name: float(part.values[row]) for name, part in parts if part.given[row]} for row in rows]
            fields["reward_parts"] = as_bytes(noted)
        return fields

    def _normalized(self, term: RewardTerm, part: Numbers, batch: Batch) -> Tensor:
        """Return a part's scores [B] as they enter the sum: normalized if the term says so, but not in evaluations."""
        if term.normalization == "None" or batch.step <= 0:
            return part.values
        counts = part.given * batch["sampled"] * float(self._scores_here)
        moments = with_step(self._moments.get(term.name, RunningMoments()), part.values, counts)
        self._moments[term.name] = moments
        return (part.values - moments.mean) / (moments.std + WHITEN_EPS)

    def _part(self, path: str, batch: Batch, samples: list[Sample]) -> Numbers:
        """Return one part's score of each response; further parts that a function names are recorded at once."""
        if path not in self._code:
            assert self._model is not None
            return Numbers(self._model.compute_reward(batch)["scores"].cpu() * batch["valid"], batch["valid"])
        scores, rows = self._scores(self._code[path], samples), real_rows(batch)
        if scores is None:
            return Numbers(torch.zeros(batch.size), batch["valid"])
        require_some_judged(path, samples, scores)
        prefix = f"{self._terms[path].name}_" if len(self._terms) > 1 else ""
        names = dict.fromkeys(name for score in scores for name in score.parts)
        _count(path, {mark: sum(score.parts.get(mark) or 0.0 for score in scores) for mark in MARKS if mark in names})
        for name in (name for name in names if name not in MARKS):
            found = [score.parts.get(name) for score in scores]
            self._measure(prefix + name, Numbers.at(rows, found, size=batch.size), batch)
        return Numbers.at(rows, [score.value for score in scores], size=batch.size)

    def _scores(self, code: UserCode, samples: list[Sample]) -> list[Score] | None:
        """Return the user code's scores of the samples; None on a rank whose rows another rank scores."""
        if not isinstance(code, JudgeClient):
            return code.scores(samples) if self._scores_here else None
        everyone: list[list[Sample]] = [[] for _ in range(dist.get_world_size())]
        # Responses to one prompt, which the judge compares with each other, may lie on several ranks.
        if code.settings.compares and code.settings.reference_key is None:
            dist.all_gather_object(everyone, samples if self._scores_here else [])
        if not self._scores_here:
            return None
        scores = code.scores(samples, among=[sample for each in everyone for sample in each])
        recorder.add("judge/questions", code.questions)
        recorder.add("judge/unread", code.unread)
        return scores

    def _measure(self, name: str, part: Numbers, batch: Batch) -> None:
        """Record mean and spread of a part over the sampled responses; greedy ones are left out."""
        self.parts[name] = part
        counts = part.given * batch["sampled"]
        values = part.values.double()
        total, squares = (values * counts).sum(), (values**2 * counts).sum()
        recorder.mean(f"reward_part/{name}", total, counts.sum())
        recorder.deviation(f"reward_part_std/{name}", total, squares, counts.sum())


def require_some_judged(path: str, samples: Sequence[Sample], scores: Sequence[Score]) -> None:
    """Raise EnvironmentProblem if none of several finished responses had a sandbox to the end of its judgement."""
    finished = [score for sample, score in zip(samples, scores, strict=True) if sample.finished]
    if len(finished) > 1 and all(each.value is None and {LOST, UNSERVED} & each.parts.keys() for each in finished):
        lost = sum(LOST in each.parts for each in finished)
        words = f"{path}: none of {len(finished)} responses was judged: {lost} lost a sandbox, the others found none"
        raise EnvironmentProblem(f"{words}; see the condition SandboxesReady and spec.sandbox.memory")


def _count(path: str, counts: Mapping[str, float]) -> None:
    """Record the parts of MARKS that a verifier gave, and warn of them."""
    if STOPPED in counts:
        recorder.add("reward/stopped", counts[STOPPED])
    if LOST in counts:
        recorder.add("sandboxes/lost", counts[LOST])
    if UNSERVED in counts:
        recorder.add("sandboxes/missing", counts[UNSERVED])
    for mark, count in counts.items():
        recorder.warn(f"{mark} {path}", f"{path}: {count:.0f} {MARKS[mark]}")


@dataclass(frozen=True)
class Numbers:
    """Scores of a batch's rows, some of which may have no score."""

    values: Tensor
    """Score of each row, float32 [B]; 0 for a row without a score."""
    given: Tensor
    """1 for each row with a score, else 0: float32 [B]."""

    @classmethod
    def at(cls, rows: Tensor, numbers: Sequence[float | None], *, size: int) -> Numbers:
        """Return `numbers` as the scores of the rows with indices `rows` [real]; all other rows have no score."""
        values, given = torch.zeros(size), torch.zeros(size)
        values[rows] = torch.tensor([0.0 if number is None else number for number in numbers])
        given[rows] = torch.tensor([float(number is not None) for number in numbers])
        return cls(values, given)


def has_noted_parts(job: Job) -> bool:
    """Whether the job writes rows to a file (kept responses, or a data set), with the parts of their rewards."""
    return bool(job.spec.rollout.keep) or job.spec.algorithm.makes == "data"


def terms_of(job: Job) -> dict[str, RewardTerm]:
    """Return the parts of a job's reward by their fields of the manifest; a reward that is no sum is its only part."""
    reward, path = job.spec.models.reward, f"{job.name}: spec.models.reward"
    if isinstance(reward, RewardSum):
        return {f"{path}.sum.{index}.reward": term for index, term in enumerate(reward.sum)}
    return {path: RewardTerm(name="all", reward=reward)} if reward else {}


def reward_code(job: Job, *, ranks: int, sandboxes: Sandboxes | None = None) -> dict[str, UserCode]:
    """Return the functions, verifiers, services and judges of a job's reward by field; their processes are started.

    sandboxes: the sandboxes that serve this process; None outside of workers, and for a job without sandboxes.
    """
    deadline = job.spec.training.call_deadline
    return {
        path: code_of(term.reward, ranks=ranks, deadline=deadline, path=path, sandboxes=sandboxes)
        for path, term in terms_of(job).items()
        if not isinstance(term.reward, Model)
    }


def code_of(
    reward: Function | RewardVerifier | RewardService | RewardJudge,
    *,
    ranks: int,
    deadline: float,
    path: str,
    sandboxes: Sandboxes | None = None,
) -> UserCode:
    """Return the scoring code for a manifest field (`path`); `ranks`: ranks that share an endpoint's concurrency.

    sandboxes: sandboxes in which the verifier Code runs responses; None: it runs them in guarded processes.
    """
    if isinstance(reward, RewardJudge):
        judge, url = reward.judge, reward.judge.url.rstrip("/") + COMPLETIONS
        return JudgeClient(url=url, settings=judge, ranks=ranks, path=f"{path}.judge")
    if isinstance(reward, RewardService):
        return ServiceClient(url=reward.url, settings=reward, ranks=ranks, path=path)
    seconds = reward.timeout_seconds
    if isinstance(reward, RewardVerifier):
        given, program = [reward.verifier.model_dump(mode="json"), seconds, ranks], VERIFIERS
        if sandboxes and isinstance(reward.verifier, Code):
            given, program = [*given, asdict(sandboxes)], IN_SANDBOXES
        options, name = {OPTIONS: given}, f"the verifier {reward.verifier.name}"
        return UserFunction(program, arguments=options, seconds=seconds, deadline=deadline, path=path, called=name)
    return UserFunction(reward.entrypoint, arguments=reward.arguments, seconds=seconds, deadline=deadline, path=path)


SCORED = ("scored_scores", "scored_valid")
"""Fields of the reward in a batch of an evaluation; missing if the job has no reward."""


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
        sandboxes = Sandboxes.of(setting.job.spec.sandbox, sharers=dist.get_world_size())
        self._judges = evaluation_code(setting.job, ranks=dist.get_world_size(), sandboxes=sandboxes)
        for judge in self._judges.values():
            judge.ready()

    @register(DP_PROTO, reads=SAMPLE_FIELDS, reads_if_there=(*SCORED, "costs", PARENTS, *COLUMNS))
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
            scores = judge.scores(samples)
            require_some_judged(f"spec.evaluation: {name}", samples, scores)
            columns |= measures_of(name, scores, taken={*columns, *self._judges})
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
    """Return the scores of a function or verifier and of its parts by measure. UserCodeError if one is `taken`."""
    found = {name: [score.value for score in scores]}
    for part in dict.fromkeys(part for score in scores for part in score.parts):
        measure = f"{name}_{part}"
        if measure in taken:
            raise UserCodeError(f"spec.evaluation: {measure} is a measure, and a part of {name} as well")
        found[measure] = [score.parts.get(part) for score in scores]
    return found


def evaluation_code(job: Job, *, ranks: int, sandboxes: Sandboxes | None = None) -> dict[str, UserCode]:
    """Return the functions and verifiers of a job's evaluation by name; their processes are started.

    ranks: number of ranks of this machine's worker, which share its CPUs.
    """
    evaluation, deadline = job.spec.evaluation, job.spec.training.call_deadline
    if evaluation is None:
        return {}
    path, code = f"{job.name}: spec.evaluation", partial(code_of, ranks=ranks, deadline=deadline, sandboxes=sandboxes)
    functions = {each.name: code(each, path=f"{path}.functions") for each in evaluation.functions}
    return functions | {each.name: code(each, path=f"{path}.verifiers") for each in evaluation.verifiers}
