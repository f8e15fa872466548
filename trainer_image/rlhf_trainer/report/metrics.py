"""Chooses the metrics of a job that are plotted, with their meanings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rlhf_planning.numbers import duration, number
from rlhf_trainer.report import plots
from rlhf_trainer.report.run_record import JobRecord

MEANINGS = {
    "reward/mean": "mean score of the sampled responses",
    "cost/mean": "mean cost of the sampled responses; above the limit it is weighed more",
    "lagrange/multiplier": "weight of the cost against the reward",
    "kl/reference": "from the reference model, nats a response",
    "response_length/mean": "tokens of a sampled response",
    "accuracy/pairs": "share of the batch's pairs ranked rightly",
    "accuracy/safety": "share of the batch's responses whose cost has the right sign",
    "margin/pairs": "mean implicit reward of the chosen response less the rejected one's",
    "groups/with_signal": "share of prompts whose responses differ in reward",
    "episodes/turns": "answers of the model in an episode",
    "episodes/failed": "episodes that nothing is learned from, as their environment failed",
    "entropy": "nats a token; near 0: no exploration",
    "clip_fraction": "share of tokens at the ratio's clip",
    "response_finished/mean": "share that ended before the token limit",
    "kl/rollout": "generator against trainer, nats a token; should be about 0",
    "ratio/first_max_deviation": "of the first mini-batch's ratio from 1; should be about 0",
    "kl/coefficient": "weight of the KL penalty",
    "tokens_per_second": "tokens a second of the whole step",
    "padding/waste": "share of tokens that are padding",
    "mfu": "FLOPs of the models by the GPUs' peak",
    "staleness": "policy versions behind the weights that learn; 0: none",
    "rollout_interrupted": "responses that new weights met while they were written",
    "rollout_replacements": "times that the rollout pool got new processes for a lost one; should be 0",
    "rollout_idle": "share of a step in which the rollout pool waits",
    "trainer_idle": "share of a step in which the actor's pool waits",
    "queue/batches": "finished ahead of training at the end of a step; always 0: training waits",
    "queue/tokens": "finished ahead of training at the end of a step",
    "sync_bytes/": "bytes of weights that the rollout pool received",
    "sync_seconds/": "seconds in which it received them",
    "kv_cache_used": "share of the generator's cache in use, at most",
    "memory_used": "share of a rank's memory in use, at most",
    "memory_bytes/": "bytes in use at the end of the phase, of the fullest rank",
    "bytes/reshard": "bytes moved from training to generation",
    "bytes/controller": "bytes that passed the controller; should be 0",
    "skipped_updates": "updates skipped for a loss or gradient that was not finite; should be 0",
    "loss/": "training loss",
    "evaluation/": "on held-out data, during training",
    "grad_norm/": "before clipping",
}
"""Beginning of a name in metrics.jsonl -> what the page says of the metric."""
LEARNING = (
    "evaluation/",
    "reward/",
    "cost/",
    "lagrange/",
    "kl/reference",
    "response_length/",
    "accuracy/",
    "margin/",
    "loss/",
)
"""Prefixes of the metrics that show whether the model learns, in the order of the page; others are health and speed."""
HEALTH = (
    "skipped_updates",
    "entropy",
    "clip_fraction",
    "response_finished/",
    "grad_norm/",
    "kl/",
    "ratio/",
    "tokens_per_second",
    "rollout_idle",
    "trainer_idle",
)
UNPLOTTED = ("step", "policy_version")
COUNTED = ("time/", "flops/", "busy/", "idle/", "staleness_rows/")
"""Families that Prometheus adds up over the steps; those of a step say little by themselves."""
PHASES = ("update", "scoring", "generation", "reshard", "controller", "transfer", "data", "advantage", "checkpoint")
"""Phases of a step; a phase has the same colour in every plot, and those that are not listed share one."""
NEARLY_CONSTANT = 1e-5
"""A metric that stays this near to 0, or changes by this share of itself (rounding errors), is a number, no plot."""


@dataclass(frozen=True)
class Panel:
    """A metric of a job over its steps."""

    name: str
    meaning: str
    first: str
    last: str
    plot: Markup


@dataclass(frozen=True)
class Overlay:
    """A metric of several jobs over their steps, each in the colour of its place."""

    name: str
    meaning: str
    last: list[tuple[int, str]]
    plot: Markup


@dataclass(frozen=True)
class Times:
    """Where the time of a job's steps went."""

    phases: list[tuple[str, int, float, float]]
    """(name, number of its colour, seconds of a mean step, per cent) of each phase, the longest first."""
    plot: Markup
    step: str
    total: float
    """Seconds in all steps."""
    overlapping: bool
    """Whether phases ran at the same time on different pools, so that they add up to more than the step."""


def panels(job: JobRecord, *, learning: bool) -> list[Panel]:
    """A plot for each metric that changes: those about learning, or all others but times."""
    chosen = [name for name in _names(job) if name.startswith(LEARNING) == learning and _changes(_series(job, name)[1])]
    order = LEARNING if learning else HEALTH
    return [_panel(job, name) for name in sorted(chosen, key=lambda name: (_rank(name, order), name))]


def overlaid(jobs: Mapping[int, JobRecord]) -> list[Overlay]:
    """A plot for each metric that changes in one of the jobs or is not the same in all, those about learning first."""
    found = []
    names = {name for job in jobs.values() for name in _names(job)}
    order = (*LEARNING, *HEALTH)
    for name in sorted(names, key=lambda name: (_rank(name, order), name)):
        series = {place: _series(job, name) for place, job in jobs.items()}
        series = {place: one for place, one in series.items() if one[0]}
        together = [value for _, values in series.values() for value in values]
        if _changes(together):
            last = [(place, number(values[-1])) for place, (_, values) in series.items()]
            title = " ".join(job.name for job in jobs.values())
            found.append(Overlay(name, _described(name, together), last, plots.lines(f"{title} {name}", series)))
    return found


def constants(job: JobRecord) -> list[tuple[str, str, str]]:
    """(name, largest value, meaning) of the metrics that never change or are nearly 0 all the time."""
    found = []
    for name in _names(job):
        _, values = _series(job, name)
        if not _changes(values):
            found.append((name, number(max(values, key=abs)), _meaning(name)))
    return found


def times(job: JobRecord) -> Times | None:
    """The time of each phase; None without a step."""
    rows = [{**dict.fromkeys(PHASES, 0.0), **_phase_times(record)} for record in job.records]
    known = {colour: [row[name] for row in rows] for colour, name in enumerate(PHASES)}
    known[len(PHASES)] = [sum(seconds for name, seconds in row.items() if name not in PHASES) for row in rows]
    series = {colour: seconds for colour, seconds in known.items() if any(seconds)}
    total, together = sum(record.get("time/step", 0.0) for record in job.records), sum(map(sum, series.values()))
    if not total or not together:
        return None
    steps = [int(record["step"]) for record in job.records]
    phases = [
        ((*PHASES, "other")[colour], colour, sum(values) / len(steps), 100 * sum(values) / together)
        for colour, values in series.items()
    ]
    return Times(
        phases=sorted(phases, key=lambda phase: -phase[-1]),
        plot=plots.stack(f"{job.name} time", steps, series),
        step=duration(total / len(steps)),
        total=total,
        overlapping=together > 1.02 * total,
    )


def _phase_times(record: Mapping[str, float]) -> dict[str, float]:
    times = {name.removeprefix("time/"): value for name, value in record.items() if name.startswith("time/")}
    return {name: value for name, value in times.items() if name != "step"}


def _names(job: JobRecord) -> list[str]:
    names = {name for record in job.records for name in record}
    return sorted(name for name in names if not name.startswith(COUNTED) and name not in UNPLOTTED)


def _series(job: JobRecord, name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of a metric, which need not be measured at every step."""
    rows = [record for record in job.records if name in record]
    return [int(row["step"]) for row in rows], [float(row[name]) for row in rows]


def _changes(values: Sequence[float]) -> bool:
    largest = max(map(abs, values))
    return largest > NEARLY_CONSTANT and max(values) - min(values) > NEARLY_CONSTANT * largest


def _panel(job: JobRecord, name: str) -> Panel:
    steps, values = _series(job, name)
    plot = plots.lines(f"{job.name} {name}", {0: (steps, values)})
    return Panel(name, _described(name, values), number(values[0]), number(values[-1]), plot)


def _described(name: str, values: Sequence[float]) -> str:
    """What a plot of these values shows."""
    return _meaning(name) + " (logarithmic)" * plots.is_log(values)


def _meaning(name: str) -> str:
    return next((text for beginning, text in MEANINGS.items() if name.startswith(beginning)), "")


def _rank(name: str, order: Sequence[str]) -> int:
    return next((index for index, prefix in enumerate(order) if name.startswith(prefix)), len(order))
