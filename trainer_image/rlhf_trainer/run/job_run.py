"""Run of one job, on any runtime: evaluation, steps, checkpoints and the saved model or data set.

The interfaces of the collaborators of `run_job` are here, too. A base class does nothing, for runs that lack the part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.algorithms import ActorCritic
from rlhf_api.spec.watch import MismatchGate, react
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.run.step_models import Handle, Rows
from rlhf_trainer.run_folder.step_metrics import repeats
from rlhf_trainer.telemetry import Report, StepReport, report_of

if TYPE_CHECKING:  # torch: seconds that `Publisher`, which is imported early, does not need
    from rlhf_trainer.workers.data import DataShape

State = dict[str, Any]
"""State of the controller after a step, besides the step's number: JSON values."""


class ModelRuntime(Protocol):
    """Interface to a job's running models: on the controller with Ray, or in one rank under torchrun."""

    @property
    def models(self) -> Mapping[str, Handle]:
        """The models by role, and the workers `data`, `advantage` and `judge`."""

    @property
    def step_models(self) -> Mapping[str, Handle]:
        """The models that the algorithm's step takes, by parameter."""

    def blank(self, step: int, size: int) -> Rows:
        """Return a batch of `size` rows that has no fields yet."""

    def send(self) -> None:
        """Send all calls made so far to the ranks."""

    def drain(self, step: int = 0) -> Sequence[Report]:
        """Wait for all calls made so far, except of steps after `step`; return the measurements of every rank."""


class Evaluator:
    """Evaluator that measures nothing; base class of the others."""

    def before(self) -> None:
        """Measure the model before its first training step."""

    def measures(self) -> list[str]:
        """Return the names of the measures, which are known once `before` or `restore` has run."""
        return []

    def during(self) -> dict[str, float]:
        """Measure during training; return the values for the record of a step."""
        return {}

    def after(self) -> dict[str, float]:
        """Measure after the last step; return the values for summary.json."""
        return {}

    def held_out_rows(self) -> list[dict[str, object]]:
        """Return the rows of samples.jsonl: held-out responses before and after training."""
        return []

    def state(self) -> object:
        """Return the measurements of `before` as JSON, for a checkpoint."""
        return None

    def restore(self, state: Any) -> None:  # JSON of a checkpoint
        """Restore the measurements of `before` from a checkpoint's `state`."""


class Checkpoints:
    """Checkpointing of a job that keeps no checkpoints (torchrun); base class of `KeptCheckpoints`."""

    def restore(self) -> State | None:
        """Load the newest complete checkpoint into the models; return its state with `step`, or None without one."""
        return None

    def end_step(self, step: int, state: Callable[[], State]) -> None:
        """Begin a checkpoint at the end of a step, if it is time for one."""

    def after_record(
        self, step: int, state: Callable[[], State], *, is_last: bool, measured: Mapping[str, float] | None = None
    ) -> None:
        """Write the step's checkpoint now if the user, a signal, a new best value or the last step requires it.

        Called once the step's record is written. Raises Stopped if a signal required it. measured: values of an
        evaluation after this step, under the names of the record.
        """

    def best_step(self, last: int, summary: Mapping[str, float]) -> dict[str, int]:  # noqa: ARG002
        """Return {"best_step": the best of the measured steps and the last} for summary.json; {} without `keepBest`."""
        return {}

    def before_model(self) -> None:
        """Check, before the trained model is written, that the job's folder still belongs to this run."""

    @contextmanager
    def around_steps(self) -> Iterator[None]:
        """Let stop signals wait for the end of the current step while the block runs."""
        yield


class Reporter:
    """Reporter of a run that writes no reports (torchrun); base class of `Publisher`."""

    def say(self, *messages: str) -> None:
        """Tell the user each message."""

    def begin(self, *, first_step: int, total_steps: int) -> None:
        """Tell that the first step of this run starts now."""

    def step(self, report: StepReport) -> None:
        """Report a finished step."""

    def write_held_out(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write the held-out responses before and after training."""


def run_job(
    job: Job,
    runtime: ModelRuntime,
    data: DataShape,
    *,
    saves: tuple[Role, Path] | None,
    evaluation: Evaluator,
    checkpoints: Checkpoints,
    reporter: Reporter,
) -> dict[str, object]:
    """Evaluate, train, evaluate and save; returns the job's part of summary.json.

    saves: the trained model and its folder; None for a job that trains none.
    """
    started, total_steps = time.monotonic(), data.total_steps
    reporter.say(*data.facts)
    if resumed := checkpoints.restore():
        evaluation.restore(resumed["evaluation"])
    else:
        evaluation.before()
    runtime.drain()
    require_measure(job, evaluation.measures())
    done, spent = (resumed["step"], resumed["seconds"]) if resumed else (0, 0.0)

    def state() -> State:
        seconds = spent + time.monotonic() - started
        return {"model": saves and saves[0], "seconds": round(seconds, 1), "evaluation": evaluation.state()}

    watch, lookahead = StepWatch(job), Lookahead(job, runtime, first_step=done + 1, total_steps=total_steps)
    reporter.say(*warmup_sentences(job, total_steps))
    reporter.begin(first_step=done + 1, total_steps=total_steps)
    every = job.spec.evaluation.every_steps if job.spec.evaluation else None
    evaluated_steps: Sequence[int] = range(every, total_steps, every) if every else ()
    with checkpoints.around_steps():
        for number in range(done + 1, total_steps + 1):
            began = time.time()
            job.spec.algorithm.step(lookahead.batch(number), **runtime.step_models)
            if job.spec.rollout.weight_store:
                runtime.models["actor"].publish_weights(waits=number == total_steps)
            runtime.send()
            checkpoints.end_step(number, state)
            report = watch.look(report_of(number, began, runtime.drain(number), repeats))
            held_out = evaluation.during() if number in evaluated_steps else {}
            counts = data.counts if number == 1 else {}
            reporter.step(replace(report, record={**report.record, **counts, **held_out}))
            checkpoints.after_record(number, state, is_last=number == total_steps, measured=held_out)
            runtime.drain()
    measured = evaluation.after()
    best = checkpoints.best_step(total_steps, measured)
    checkpoints.before_model()
    if saves:
        role, folder = saves
        runtime.models[role].save(folder=str(folder)).result()
    runtime.drain()
    reporter.write_held_out(evaluation.held_out_rows())
    told = {"seed": job.spec.training.seed, "end_tokens": dict(data.end_tokens)}
    return {"steps": total_steps, "seconds": state()["seconds"], **told, **best, **measured}


class StepWatch:
    """Watch for bad steps that raise no error: `spec.watch.mismatch` and `spec.watch.noSignal`."""

    def __init__(self, job: Job) -> None:
        self._job, self._steps = job, 0

    def look(self, report: StepReport) -> StepReport:
        """Return the report with the warnings of a step; SpecError if the manifest says Fail.

        A warning about steps without a signal comes after 3, 6, 12 ... of them in a row.
        """
        if gate := self._job.spec.watch.mismatch:
            sentences = mismatch_sentences(report.record, gate)
            found = react(gate.action, f"{self._job.name}: spec.watch.mismatch", sentences)
            report = replace(report, warnings=[*report.warnings, *found])
        cause = cause_of(report.record, self._job) if self._job.trained() else ""
        self._steps = self._steps + 1 if cause else 0
        if self._steps % 3 or (self._steps // 3).bit_count() != 1:
            return report
        shown = f"; for example {' and '.join(report.examples)}" if report.examples else ""
        sentence = f"no signal in {self._steps} steps in a row: {cause}{shown}"
        found = react(self._job.spec.watch.no_signal, f"{self._job.name}: spec.watch.noSignal", [sentence])
        return replace(report, warnings=[*report.warnings, *found])


def mismatch_sentences(record: Mapping[str, float], gate: MismatchGate) -> list[str]:
    """Return a sentence if generator and trainer were farther apart in a step than the gate allows; else []."""
    is_skipped, kl = record.get("skipped_updates/mismatch", 0.0) > 0, record.get("kl/rollout", 0.0)
    if not (is_skipped if gate.stops_update else not kl <= gate.kl):  # NaN exceeds the gate, too
        return []
    sentence = f"KL between generator and trainer is {kl:.2g} a token, more than {gate.kl:g}"
    return [sentence + ", so the actor was not updated" * is_skipped]


def cause_of(record: Mapping[str, float], job: Job) -> str:
    """Return the likely reason why nothing can be learned from a step; empty if something can."""
    if record.get("response_finished/mean") == 0.0:
        return "every response was cut off (spec.data.maxResponseTokens); does the model write its end token?"
    mean, spread = record.get("reward/mean", 0.0), record.get("reward/std")
    if spread is not None and spread <= 1e-6 * max(1.0, abs(mean)) and job.sequences_per_step > 1:
        if without := record.get("episodes/failed", 0.0) + record.get("reward/left_out", 0.0):
            return f"{without:.0f} responses have no reward, and every other one got {mean:.6g}"
        form = "does the prompt ask for the form that the reward reads (spec.data.promptTemplate, responseExtract)?"
        return f"every response got the reward {mean:.6g}; {'is the task too easy?' if mean > 0 else form}"
    if record.get("groups/with_signal") == 0.0:
        return "the responses to each prompt got equal rewards; take easier or harder prompts, or more samples"
    norms = [value for name, value in record.items() if name.startswith("grad_norm/")]
    return "every gradient is 0" if norms and not any(norms) else ""


class Lookahead:
    """Source of each step's batch, which has later batches generated ahead as far as `rollout.maxStaleness` allows.

    With N = maxStaleness = 1, and Pk the policy after k updates:

        step 1               step 2               step 3
        train on rows of P0  train on rows of P0  train on rows of P1  ...
        generate for 1, 2 with P0  3 with P1            4 with P2.

    So the rows of step s are written by policy max(0, s - 1 - N) or a newer one.
    """

    def __init__(self, job: Job, runtime: ModelRuntime, *, first_step: int, total_steps: int) -> None:
        self._job, self._runtime, self._total_steps = job, runtime, total_steps
        self._staleness = job.spec.rollout.max_staleness
        self._next = first_step
        self._batches: dict[int, Rows] = {}

    def batch(self, step: int) -> Rows:
        """Return the batch of a step; request the responses of steps up to `rollout.maxStaleness` after it ahead."""
        last = min(step + self._staleness, self._total_steps)
        for number in range(self._next, last + 1):
            blank = self._runtime.blank(number, self._job.sequences_per_step)
            self._batches[number] = self._runtime.models["data"].load_batch(blank)
            if self._staleness:
                self._runtime.models["actor"].generate_ahead(self._batches[number])
        self._next = last + 1
        return self._batches.pop(step)


def warmup_sentences(job: Job, total_steps: int) -> list[str]:
    """Return a sentence for a job that ends before its actor learns (`criticWarmupSteps`); empty for other jobs."""
    algorithm = job.spec.algorithm
    warmup = algorithm.critic_warmup_steps if isinstance(algorithm, ActorCritic) else 0
    if warmup < total_steps:
        return []
    return [f"the actor learns nothing: algorithm.criticWarmupSteps is {warmup}, and the job has {total_steps} steps"]


def require_measure(job: Job, names: Collection[str]) -> None:
    """Raise ConfigError if `checkpoint.keepBest` names a measure that is not among `names`."""
    wanted = job.spec.checkpoint.keep_best
    if wanted is not None and wanted not in names:
        path = f"{job.name}: spec.checkpoint.keepBest"
        raise ConfigError(f"{path}: {wanted} is not measured; there are {', '.join(names)}")
