"""Run of one job, on any runtime: evaluation, steps, checkpoints and the saved model or data set."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_api.job import Job
from rlhf_api.spec.algorithms import ActorCritic
from rlhf_trainer.run.checkpoints import Checkpoints, State
from rlhf_trainer.run.evaluation import Runtime, evaluation_of, require_measure
from rlhf_trainer.run.publisher import Publisher
from rlhf_trainer.run.step_models import Rows, inputs_of, training_batch
from rlhf_trainer.telemetry import (
    CONTROLLER,
    Report,
    Span,
    StepReport,
    idle_shares,
    merge,
    phase_seconds,
    slot_seconds,
    utilization,
)
from rlhf_trainer.workers.data import DataShape


def run_job(
    job: Job,
    runtime: Runtime,
    data: DataShape,
    *,
    made: Path,
    publisher: Publisher | None,
    checkpoints: Checkpoints,
) -> dict[str, object]:
    """Evaluate, train, evaluate and save; returns the job's part of summary.json.

    data: the numbers of rows; made: folder of the trained model or data set; publisher: None on a rank without reports.
    """
    started, total_steps = time.monotonic(), job.total_steps_for(data.rows)
    inputs, evaluation = inputs_of(job, runtime.models), evaluation_of(job, runtime, data)
    if resumed := checkpoints.restore():
        evaluation.restore(resumed["evaluation"])
    else:
        evaluation.before()
    runtime.drain()
    require_measure(job, evaluation.measures())
    done, spent = (resumed["step"], resumed["seconds"]) if resumed else (0, 0.0)
    trained = job.saved if job.trained() else None

    def state() -> State:
        seconds = spent + time.monotonic() - started
        return {"model": trained, "seconds": round(seconds, 1), "evaluation": evaluation.state()}

    lookahead = Lookahead(job, runtime, first_step=done + 1, total_steps=total_steps)
    if publisher:
        publisher.say(*warmup_sentences(job, total_steps))
        publisher.begin(first_step=done + 1, total_steps=total_steps)
    every = job.spec.evaluation.every_steps if job.spec.evaluation else None
    evaluated_steps: Sequence[int] = range(every, total_steps, every) if every else ()
    with checkpoints.around_steps():
        for number in range(done + 1, total_steps + 1):
            began = time.time()
            job.spec.algorithm.step(lookahead.batch(number), **inputs)
            runtime.send()
            checkpoints.end_step(number, state)
            report = report_of(number, began, runtime.drain(number))
            held_out = evaluation.during() if number in evaluated_steps else {}
            if publisher:
                publisher.step(replace(report, record=finite({**report.record, **held_out})))
            checkpoints.after_record(number, state, is_last=number == total_steps, measured=held_out)
            runtime.drain()
    measured = evaluation.after()
    best = checkpoints.best_step(total_steps, measured)
    checkpoints.before_model()
    if trained:
        runtime.models[trained].save(folder=str(made)).result()
    runtime.drain()
    if publisher:
        publisher.folder.samples(evaluation.samples())
    return {"steps": total_steps, "seconds": state()["seconds"], "seed": job.spec.training.seed, **best, **measured}


class Lookahead:
    """Source of each step's batch, which has later batches generated ahead as far as `rollout.maxStaleness` allows.

    With N = maxStaleness = 1, and Pk the policy after k updates:

        step 1               step 2               step 3
        train on rows of P0  train on rows of P0  train on rows of P1  ...
        generate for 1, 2 with P0  3 with P1            4 with P2.

    So the rows of step s are written by policy max(0, s - 1 - N) or a newer one.
    """

    def __init__(self, job: Job, runtime: Runtime, *, first_step: int, total_steps: int) -> None:
        self._job, self._runtime, self._total_steps = job, runtime, total_steps
        self._staleness = job.spec.rollout.max_staleness
        self._next = first_step
        self._batches: dict[int, Rows] = {}

    def batch(self, step: int) -> Rows:
        """Return the batch of a step; request the responses of steps up to `rollout.maxStaleness` after it ahead."""
        last = min(step + self._staleness, self._total_steps)
        for number in range(self._next, last + 1):
            blank = self._runtime.blank(number, self._job.sequences_per_step)
            self._batches[number] = training_batch(self._job, self._runtime.models["data"], blank)
            if self._staleness:
                self._runtime.models["actor"].generate_ahead(self._batches[number])
        self._next = last + 1
        return self._batches.pop(step)


def finite(record: Mapping[str, float]) -> dict[str, float]:
    """Return the finite values of a record: JSON has no others, and `skipped_updates` counts updates they prevented."""
    return {name: value for name, value in record.items() if math.isfinite(value)}


def report_of(number: int, began: float, reports: Sequence[Report]) -> StepReport:
    """Return a step's metrics for metrics.jsonl (times in seconds), warnings and time spans; the step ends now."""
    seconds = time.time() - began
    spans = [span for report in reports for span in report.spans]
    record = {"step": number, **merge(reports), **phase_seconds(spans, seconds), **slot_seconds(spans, seconds)}
    record |= utilization(record, spans, seconds) | idle_shares(record, spans)
    record.pop("peak_flops", None)
    if "tokens" in record:
        record["tokens_per_second"] = record.pop("tokens") / seconds
    warnings = {name: message for report in reports for name, message in report.warnings.items()}
    return StepReport(
        record=record,
        warnings=[warnings[name] for name in sorted(warnings)],
        spans=[Span(CONTROLLER, f"step {number}", 0, began, began + seconds), *spans],
    )


def warmup_sentences(job: Job, total_steps: int) -> list[str]:
    """Return a sentence for a job that ends before its actor learns (`criticWarmupSteps`); empty for other jobs."""
    algorithm = job.spec.algorithm
    warmup = algorithm.critic_warmup_steps if isinstance(algorithm, ActorCritic) else 0
    if warmup < total_steps:
        return []
    return [f"the actor learns nothing: algorithm.criticWarmupSteps is {warmup}, and the job has {total_steps} steps"]
