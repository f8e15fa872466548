"""Evaluation on held-out data: a loss, the pair accuracy, or responses before and after training."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rlhf_api.job import Job
from rlhf_api.measures import measure_of, pass_sizes
from rlhf_trainer.errors import NumericsError
from rlhf_trainer.ops.pass_at_k import pass_at
from rlhf_trainer.run.job_run import Evaluator, ModelRuntime
from rlhf_trainer.workers.data import DataShape
from rlhf_trainer.workers.scoring import JudgedRow

FIRST_DRAW, SECOND_DRAW = 0, -1
"""Step numbers of the batches of an evaluation; the responses of the two draws have different seeds."""

OFFLINE = {"loss": "evaluate_completions", "pair_accuracy": "evaluate_pairs"}
"""Measure of an offline job -> worker method that measures it."""


class HeldOut(Evaluator):
    """Evaluator of offline jobs: mean of one measure over the held-out rows, from each rank's (total, weight)."""

    def __init__(self, runtime: ModelRuntime, data: DataShape, *, job: Job) -> None:
        self._runtime, self._rows = runtime, data.evaluation_rows
        (role,), calls = job.spec.algorithm.trained, job.spec.algorithm.calls
        (self._measure,) = job.measures
        self._evaluate = getattr(runtime.models[role], OFFLINE[self._measure])
        self._before = [getattr(runtime.models[of], call) for of, call in calls if call.startswith("compute_")]

    def measures(self) -> list[str]:
        return [self._measure]

    def during(self) -> dict[str, float]:
        return {f"evaluation/{self._measure}": self._mean()}

    def after(self) -> dict[str, float]:
        return {self._measure: self._mean()}

    def _mean(self) -> float:
        batch = self._runtime.models["data"].load_evaluation(self._runtime.blank(FIRST_DRAW, self._rows))
        for call in self._before:
            batch = call(batch)
        parts = self._evaluate(batch).result()
        self._runtime.drain()
        return finite(self._measure, sum(total for total, _ in parts) / sum(weight for _, weight in parts))


class ResponseEvaluator(Evaluator):
    """Evaluator of responses to the held-out prompts, generated before and after training with the same seeds.

    Reward, functions and verifiers score responses. Measures are means over all responses to all prompts. A response
    wins if it scores higher than the earlier one of the same prompt and index; a tie counts 0.5. The score is that of
    the first function; without functions, of the first verifier; without either, the reward. win_rate_null compares
    two draws before training.
    """

    def __init__(self, runtime: ModelRuntime, data: DataShape, *, job: Job) -> None:
        assert job.spec.evaluation, "the job has an evaluation"
        asked = job.spec.evaluation
        self._runtime, self._rows, self._sets = runtime, data.evaluation_rows, data.evaluation_sets
        self._costs = runtime.models.get("cost")
        self._options = {} if not asked.greedy else {"do_sample": False}
        self._samples = asked.samples_per_prompt
        self._passed = job.pass_measures
        judges = [*(function.name for function in asked.functions), *(verifier.name for verifier in asked.verifiers)]
        self._decider = judges[0] if judges else "reward"
        self._before: list[JudgedRow] = []
        self._again: list[JudgedRow] = []
        self._after: list[JudgedRow] = []

    def before(self) -> None:
        self._before, self._again = self._draw(FIRST_DRAW), self._draw(SECOND_DRAW)

    def measures(self) -> list[str]:
        return list(self._compared(self._before))

    def during(self) -> dict[str, float]:
        return {f"evaluation/{name}": value for name, value in self._compared(self._draw(FIRST_DRAW)).items()}

    def after(self) -> dict[str, float]:
        self._after = self._draw(FIRST_DRAW)
        before, after = self._measures(self._before), self._measures(self._after)
        summary = {}
        for measure in [each for each in before if each in after]:
            summary[f"{measure}_before"], summary[f"{measure}_after"] = before[measure], after[measure]
        summary |= self._win_rates(self._after)
        summary["win_rate_null"] = win_rate(self._again, self._before, self._decider)
        return summary

    def held_out_rows(self) -> list[dict[str, object]]:
        names = [name for name, rows in self._slices().items() for _ in range(len(self._before))[rows] if name]
        return [
            {
                **({"set": names[place]} if names else {}),
                "prompt": before.prompt,
                "response_before": before.response,
                "response_after": after.response,
                **{f"{measure}_before": score for measure, score in before.scores.items()},
                **{f"{measure}_after": score for measure, score in after.scores.items()},
            }
            for place, (before, after) in enumerate(zip(self._before, self._after, strict=True))
        ]

    def state(self) -> object:
        return [[asdict(row) for row in rows] for rows in (self._before, self._again)]

    def restore(self, state: Any) -> None:  # JSON of a checkpoint
        self._before, self._again = ([JudgedRow(**row) for row in rows] for rows in state)

    def _slices(self) -> dict[str, slice]:
        """Return the slice of rows of each data set by its name, and of all rows under the empty name."""
        found, start = {"": slice(None)}, 0
        for name, rows in self._sets.items():
            end = start + rows * self._samples
            found[name], start = slice(start, end), end
        return found

    def _compared(self, rows: Sequence[JudgedRow]) -> dict[str, float]:
        return {**self._measures(rows), **self._win_rates(rows)}

    def _measures(self, rows: Sequence[JudgedRow]) -> dict[str, float]:
        """Return the mean of every measure and pass@k of verifiers: over all rows, and as SET/MEASURE over each set."""
        found: dict[str, float] = {}
        for name, some in self._slices().items():
            of_set = means(rows[some])
            for measure in self._passed:
                passes = passes_at(rows[some], measure, samples=self._samples)
                of_set |= {f"{measure}_pass_at_{k}": share for k, share in passes.items()}
            found |= {measure_of(name, measure): value for measure, value in of_set.items()}
        return found

    def _win_rates(self, rows: Sequence[JudgedRow]) -> dict[str, float]:
        sets = self._slices().items()
        rates = {name: win_rate(rows[some], self._before[some], self._decider) for name, some in sets}
        return {measure_of(name, "win_rate"): rate for name, rate in rates.items()}

    def _draw(self, draw: int) -> list[JudgedRow]:
        """Generate and score the current actor's responses to every held-out prompt; draw: the batch's step number."""
        models = self._runtime.models
        batch = models["data"].load_evaluation(self._runtime.blank(draw, self._rows))
        batch = models["actor"].generate_sequences(batch, **self._options)
        if "reward" in models:
            batch = batch.with_prefixed(scored=models["reward"].compute_reward(batch))  # rows without a score stay
        if self._costs:
            batch = self._costs.compute_cost(batch)
        parts = models["judge"].judge(batch).result()
        self._runtime.drain()
        return [row for part in parts for row in part]


class Written(Evaluator):
    """Evaluator of a job that makes a data set: counts of the written rows."""

    def __init__(self, runtime: ModelRuntime) -> None:
        self._runtime = runtime

    def after(self) -> dict[str, float]:
        summary: dict[str, float] = self._runtime.models["responses"].summary().result()[0]
        return summary


def means(rows: Sequence[JudgedRow]) -> dict[str, float]:
    """Return the mean of each measure over rows with a score, the mean length and the share of finished responses."""
    found: dict[str, list[float]] = {}
    for measure, score in (each for row in rows for each in row.scores.items()):
        if score is not None:
            found.setdefault(measure, []).append(score)
    found["response_tokens"] = [float(row.response_tokens) for row in rows]
    found["response_finished"] = [float(row.finished) for row in rows]
    return {measure: finite(measure, sum(scores) / len(scores)) for measure, scores in found.items()}


def passes_at(rows: Sequence[JudgedRow], measure: str, *, samples: int) -> dict[int, float]:
    """Return pass@k of a measure as a mean over the prompts, for each k of `pass_sizes(samples)`.

    A response passes with a score of 1; one without a score does not.
    """
    groups = (rows[start : start + samples] for start in range(0, len(rows), samples))
    passed = [sum(row.scores[measure] == 1.0 for row in group) for group in groups]
    return {
        k: sum(pass_at(k, samples=samples, passed=count) for count in passed) / len(passed) for k in pass_sizes(samples)
    }


def finite(measure: str, value: float) -> float:
    """Return the value of a measure; NumericsError if it is not finite."""
    if not math.isfinite(value):
        raise NumericsError(f"spec.evaluation: {measure} is {value} on the held-out rows: the model is broken")
    return value


def win_rate(rows: Sequence[JudgedRow], others: Sequence[JudgedRow], measure: str) -> float:
    """Return the share of `rows` that score higher than the same row of `others`; a tie or no score counts 0.5."""
    pairs = [(row.scores[measure], other.scores[measure]) for row, other in zip(rows, others, strict=True)]
    wins = [0.5 if mine is None or theirs is None or mine == theirs else float(mine > theirs) for mine, theirs in pairs]
    return sum(wins) / len(wins)


def evaluation_of(job: Job, runtime: ModelRuntime, data: DataShape) -> Evaluator:
    """Return the kind of evaluation that a job's manifest asks for."""
    if job.spec.algorithm.makes == "data":
        return Written(runtime)
    if job.spec.evaluation is None:
        return Evaluator()
    if job.spec.algorithm.offline:
        return HeldOut(runtime, data, job=job)
    return ResponseEvaluator(runtime, data, job=job)
