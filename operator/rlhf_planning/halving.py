"""Successive halving (Hyperband, arXiv 1603.06560): trials of a job, the best of which go on to the next rung."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Annotated, Final, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from rlhf_api.chain import SCHEME, inputs_of
from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError, suggestion
from rlhf_planning.numbers import number

Vary = Annotated[list[str], typer.Option("--vary", metavar="PATH=VALUE,VALUE", help="Field to vary; repeatable.")]
Measure = Annotated[str, typer.Option(metavar="evaluation/NAME", help="Measure of evaluation to compare trials by.")]
Budget = Annotated[int, typer.Option(metavar="STEPS", min=1, help="Most training steps of all trials together.")]
TunedJob = Annotated[str | None, typer.Option("--job", help="Name of the job to tune; default: the last one.")]
SET_BY_SEARCH: Final = ("training.totalSteps", "checkpoint.pauseAfterStep", "evaluation.everySteps")
"""Fields that the search itself sets, so that they cannot be varied."""
PREFIX: Final = "evaluation/"
"""Beginning of the names of measures of evaluation among the metrics of a step."""
ETA: Final = 3
"""At each rung a third of the trials goes on, to three times the steps."""


class Rung(NamedTuple):
    """Step at which trials are measured and compared, and the number of trials that are trained to it."""

    trials: int
    step: int


@dataclass
class Trial:
    """One choice of the varied fields, and how far the job has come with it."""

    name: str
    sets: list[str]
    """Arguments of `--set`: `JOB:path=value`."""
    step: int = 0
    """Step of the rung at which the trial was last measured."""
    value: float | None = None
    reason: str = ""
    """Reason why the trial failed; empty if it did not."""


class Search(NamedTuple):
    """Job to tune, after the jobs that it needs, and the plan of its trials."""

    chain: Sequence[Job]
    measure: str
    trials: Sequence[Trial]
    rungs: Sequence[Rung]

    @property
    def shared(self) -> list[str]:
        """Names of the jobs that trials read."""
        return [job.name for job in self.chain[:-1]]

    def sets(self, trial: Trial, rung: Rung) -> list[str]:
        """Return the arguments of `--set` by which a trial is measured at a rung, and pauses there before its end."""
        job = self.chain[-1]
        is_end = rung.step == job.spec.training.total_steps
        fields = () if is_end else ("checkpoint.pauseAfterStep", "evaluation.everySteps")
        return [*trial.sets, *(f"{job.name}:{field}={rung.step}" for field in fields)]

    @property
    def failure(self) -> str:
        """Sentence on a search without a best trial, with the reason of a trial that came furthest."""
        last = max((trial for trial in self.trials if trial.reason), key=lambda trial: trial.step)
        return f"no trial is left; {last.name} failed: {last.reason}"

    def __str__(self) -> str:
        plan = ", ".join(f"{count} to step {step}" for count, step in self.rungs)
        return f"{len(self.trials)} trials of {self.chain[-1].name}: {plan}; {steps_of(self.rungs)} steps in all"


def search_of(jobs: Sequence[Job], varied: Sequence[str], measure: str, budget: int, name: str | None) -> Search:
    """Return the search that a user asks for; jobs: of a manifest, in order. Raises SpecError.

    varied: texts `[JOB:]path=value,value`; name: of the job to tune; None: the last one.
    """
    if name not in (None, *(job.name for job in jobs)):
        raise SpecError([Problem("--job", f"is {name}; {suggestion(str(name), [job.name for job in jobs])}")])
    chain = [next((job for job in jobs if job.name == name), jobs[-1])]
    values = {value.strip() for text in varied for value in text.partition("=")[2].split(",")}
    for job in reversed(jobs):
        if f"{SCHEME}{job.name}" in values or any(job.name in inputs_of(each) for each in chain):
            chain.insert(0, job)
    if chain[-1] in chain[:-1]:
        raise SpecError([Problem("--vary", f"has a value that reads {chain[-1].name}, the job to tune")])
    tuned, trials = chain[-1], trials_of(varied, chain[-1].name)
    if not (steps := tuned.spec.training.total_steps):
        raise SpecError([Problem(f"{tuned.name}: spec.training.totalSteps", "is missing, a search needs it")])
    if tuned.spec.checkpoint.pause_after_step:
        raise SpecError([Problem(f"{tuned.name}: spec.checkpoint.pauseAfterStep", "is set, but the search sets it")])
    require_measured(tuned, measure)
    return Search(chain, measure, trials, rungs_of(len(trials), steps, budget))


def require_measured(job: Job, measure: str) -> None:
    """Raise SpecError if a job, or one of its trials, does not write a measure."""
    if job.spec.evaluation is None:
        raise SpecError([Problem(f"{job.name}: spec.evaluation", "is missing, a search needs it")])
    if not (measure.startswith(PREFIX) and job.is_measured(measure.removeprefix(PREFIX))):
        near = suggestion(PREFIX + measure.removeprefix(PREFIX), [f"{PREFIX}{each}" for each in job.measures])
        raise SpecError([Problem("--measure", f"is {measure}, which {job.name} does not write; {near}")])


def trials_of(varied: Sequence[str], job: str) -> list[Trial]:
    """Return a trial for each combination of values; varied: as in `search_of`. Raises SpecError."""
    choices: dict[str, list[str]] = {}
    for text in varied:
        target, _, values = text.partition("=")
        name, _, path = target.rpartition(":")
        found, path = [each.strip() for each in values.split(",")], path.removeprefix("spec.")
        is_right = all(path.split(".")) and "" not in found and 1 < len(set(found)) == len(found)
        wrong = "" if is_right else "expected path=value,value with different values"
        wrong = "the same field is varied twice" if path in choices else wrong
        wrong = "a list or a mapping cannot be varied" if set(values) & set("[]{}") else wrong
        wrong = "is the same in all trials" if path in SET_BY_SEARCH else wrong
        wrong = "names the job, expected a field of its spec" if path.partition(".")[0] == "metadata" else wrong
        if name not in ("", job):
            wrong = f"all trials share {name}; vary a field of {job}, or name another --job"
        if wrong:
            raise SpecError([Problem(f"--vary {text}", wrong)])
        choices[path] = [f"{job}:{path}={each}" for each in found]
    return [Trial(f"t{place}", [*sets]) for place, sets in enumerate(product(*choices.values()), start=1)]


def rungs_of(trials: int, steps: int, budget: int) -> list[Rung]:
    """Return the rungs, the first as late as the budget allows; if the budget leaves steps, more trials go on.

    steps: of the whole job; budget: training steps of all trials together. SpecError if it is too small.
    """
    counts, first = [trials], steps
    while True:
        rungs = [Rung(count, first * ETA**place) for place, count in enumerate(counts[:-1])] + [Rung(counts[-1], steps)]
        if steps_of(rungs) <= budget:
            break
        if counts[-1] == 1 or first < ETA:
            needs = ", ".join(f"{count} to step {step}" for count, step in rungs)
            message = f"is {budget} steps; {trials} trials of {steps} steps need {steps_of(rungs)} or more ({needs})"
            raise SpecError([Problem("--budget", message)])
        counts, first = [*counts, max(1, counts[-1] // ETA)], steps // ETA ** len(counts)
    for place in range(len(rungs) - 1, 0, -1):
        for count in range(rungs[place].trials + 1, rungs[place - 1].trials + 1):
            more = [*rungs[:place], Rung(count, rungs[place].step), *rungs[place + 1 :]]
            rungs = more if steps_of(more) <= budget else rungs
    return rungs


def steps_of(rungs: Sequence[Rung]) -> int:
    """Return the training steps of all trials together: a trial goes on from its last rung."""
    return sum(after.trials * (after.step - before.step) for before, after in pairwise([Rung(0, 0), *rungs]))


def is_lowest_best(measure: str) -> bool:
    """Whether a lower value of a measure of evaluation is better: of a loss or a cost."""
    return measure.rpartition("/")[2] in ("loss", "cost")


def halve(search: Search, run: Callable[[Sequence[Trial], Rung], None]) -> Trial | None:
    """Run the search over its rungs, and return the best trial; None if all have failed.

    run: trains the given trials to a rung, and sets each trial's step and value, or its reason.
    """
    sign, going = -1 if is_lowest_best(search.measure) else 1, list(search.trials)
    for rung in search.rungs:
        going = going[: rung.trials]
        run(going, rung)
        measured = [(trial.value, trial) for trial in going if trial.value is not None and not trial.reason]
        going = [trial for _, trial in sorted(measured, key=lambda each: -sign * each[0])]  # ties keep their order
    return going[0] if going else None


def show(search: Search, best: Trial, compare: str, place_of: Callable[[Trial], str]) -> None:
    """Print the trials, why some have failed, a command that compares those with most steps, and the best trial.

    compare: command; place_of: the folder or the job of a trial.
    """
    fields = [each.partition("=")[0].rpartition(".")[2] for each in best.sets]
    table = Table("trial", *fields, "step", search.measure, box=None)
    for trial in search.trials:
        value = "failed" if trial.value is None else number(trial.value)
        table.add_row(trial.name, *(each.partition("=")[2] for each in trial.sets), str(trial.step), value)
    Console(highlight=False).print(table)
    for trial in search.trials:
        if trial.reason:
            typer.echo(f"{trial.name} failed: {trial.reason}")
    far = sorted((trial for trial in search.trials if not trial.reason), key=lambda trial: -trial.step)[:4]
    typer.echo(f"compare: {compare} {shlex.join(map(place_of, far))}")
    typer.echo(f"best: {place_of(best)} {shlex.join(word for each in best.sets for word in ('--set', each))}")
