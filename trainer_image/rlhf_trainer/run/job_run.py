"""One job from its first step, or from its newest checkpoint, to its saved model, on any runtime."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_api.job import Job
from rlhf_trainer.run.checkpoints import Checkpoints, State
from rlhf_trainer.run.evaluation import Runtime, evaluation_of
from rlhf_trainer.run.loop import Record, train
from rlhf_trainer.run.publisher import Publisher
from rlhf_trainer.run.stages import stage_of
from rlhf_trainer.telemetry import Report, StepReport


def silent(_: StepReport) -> None:
    """Tells nobody of a step."""


def run_job(
    job: Job,
    runtime: Runtime,
    *,
    total_steps: int,
    evaluation_rows: int,
    model_folder: Path,
    publisher: Publisher | None,
    checkpoints: Checkpoints,
) -> dict[str, Any]:
    """Evaluate, train, evaluate and save; returns the job's part of summary.json.

    A rank that has no `publisher` (torchrun, rank 1 and above) tells nobody.
    """
    stage, started = stage_of(job), time.monotonic()
    inputs = {role: model for role, model in runtime.models.items() if role not in ("data", "judge")}
    evaluation = evaluation_of(job, runtime, evaluation_rows)
    if resumed := checkpoints.restore():
        evaluation.restore(resumed["evaluation"])
    else:
        evaluation.before()
    runtime.drain()
    done, spent = (resumed["step"], resumed["seconds"]) if resumed else (0, 0.0)

    def state() -> State:
        seconds = spent + time.monotonic() - started
        return {"model": stage.saved, "seconds": round(seconds, 1), "evaluation": evaluation.state()}

    def run_step(number: int) -> Sequence[Report]:
        batch = runtime.models["data"].load_batch(runtime.blank(number, job.sequences_per_step))
        stage.step(batch, **inputs)
        checkpoints.end_step(number, state)
        return runtime.drain()

    def measure(number: int) -> Record:
        every = job.spec.evaluation.every_steps if job.spec.evaluation else None
        return evaluation.during() if every and number % every == 0 and number < total_steps else {}

    def after_record(number: int) -> None:
        checkpoints.after_record(number, state, is_last=number == total_steps)
        runtime.drain()

    if publisher:
        publisher.begin(first_step=done + 1, total_steps=total_steps)
    with checkpoints.around_steps():
        train(
            run_step,
            first_step=done + 1,
            total_steps=total_steps,
            measure=measure,
            publish=publisher.step if publisher else silent,
            after_record=after_record,
        )
    measured = evaluation.after()
    checkpoints.before_model()
    runtime.models[stage.saved].save(folder=str(model_folder)).result()
    runtime.drain()
    if publisher:
        publisher.folder.samples(evaluation.samples())
    return {"steps": total_steps, "seconds": state()["seconds"], "seed": job.spec.training.seed, **measured}
