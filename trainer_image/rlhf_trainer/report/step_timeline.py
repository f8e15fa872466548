"""Timeline of one traced step: what the ranks of each pool did in the step's time, also for other steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rlhf_planning.numbers import duration
from rlhf_trainer.report import plots
from rlhf_trainer.report.bars import Bar
from rlhf_trainer.report.metrics import PHASES
from rlhf_trainer.report.run_record import JobRecord
from rlhf_trainer.report.trace_events import Event

MAX_LANES = 8
"""Ranks that are all drawn; of more ranks only the first of each pool is drawn."""
MAX_NAME = 22
"""Letters of a lane's name; a longer one is cut."""
CONTROLLER, TRANSFER = "controller", "transfer"
"""Phases in which no rank works."""


@dataclass(frozen=True)
class Lane:
    """Row of a rank: name, bars with the longest first, and the share of the step in which the rank waits."""

    name: str
    bars: Sequence[Bar]
    waits: str


@dataclass(frozen=True)
class StepTimeline:
    """Traced step with the lanes of its ranks."""

    step: int
    seconds: float
    lanes: Sequence[Lane]
    phases: Sequence[tuple[str, int]]
    """Name and number of the colour of the phases that are drawn."""
    later: int
    """The last step for which some of the work was done."""

    def plot(self) -> Markup:
        """Draw the lanes."""
        rows = [(f"{lane.name}  {lane.waits}", lane.bars) for lane in self.lanes]
        return plots.timeline(f"step {self.step}", rows, self.seconds)


def step_timeline(job: JobRecord) -> StepTimeline | None:
    """Return a traced step of median length, not the first if there are others; None if no step was traced whole."""
    spans = {event.step: event for event in job.trace if event.phase == CONTROLLER and event.name.startswith("step ")}
    ahead = int((job.spec.get("rollout") or {}).get("maxStaleness") or 0)
    whole = [step for step in spans if step + ahead in spans]
    if not whole:
        return None
    by_length = sorted(whole[1:] or whole, key=lambda step: spans[step].end - spans[step].start)
    step = by_length[len(by_length) // 2]
    start, end = spans[step].start, spans[step].end
    there = [
        event._replace(start=max(event.start, start) - start, end=min(event.end, end) - start)
        for event in job.trace
        if event.phase != CONTROLLER and event.start < end and event.end > start
    ]
    done = [event for event in there if event.phase != TRANSFER]
    drawn = {_colour(event.phase): event.phase if event.phase in PHASES else "other" for event in done}
    return StepTimeline(
        step=step,
        seconds=end - start,
        lanes=list(_lanes(done, [event for event in there if event.phase == TRANSFER], step, end - start)),
        phases=[(drawn[colour], colour) for colour in sorted(drawn)],
        later=max((event.step for event in done), default=step),
    )


def _lanes(done: Sequence[Event], waits: Sequence[Event], step: int, seconds: float) -> Iterator[Lane]:
    ranks = sorted({(event.pool, event.rank) for event in done})
    shown = ranks if len(ranks) <= MAX_LANES else [(pool, rank) for pool, rank in ranks if rank == 0]
    for pool, rank in shown:
        own, waited = ([each for each in some if (each.pool, each.rank) == (pool, rank)] for some in (done, waits))
        pool_size = sum(other == pool for other, _ in ranks)
        worked = _covered([*own, *waited]) - _covered(waited)
        yield Lane(
            name=pool[:MAX_NAME] if pool and pool_size == 1 else f"{pool[: MAX_NAME - 8]} rank {rank}".strip(),
            bars=[_bar(event, step) for event in sorted(own, key=lambda each: each.start - each.end)],
            waits=f"{1 - worked / seconds:.0%}",
        )


def _covered(events: Sequence[Event]) -> float:
    """Return the seconds in which there is at least one event."""
    total, reached = 0.0, 0.0
    for event in sorted(events, key=lambda each: each.start):
        total += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    return total


def _bar(event: Event, step: int) -> Bar:
    later = f" for step {event.step}" if event.step != step else ""
    return Bar(
        start=event.start,
        end=event.end,
        colour=plots.SERIES[_colour(event.phase)],
        labels=(event.phase + later, event.phase),
        hover=f"{event.name}{later}: {duration(event.end - event.start)}",
    )


def _colour(phase: str) -> int:
    """Return the number of the phase's colour in the other plots."""
    return PHASES.index(phase) if phase in PHASES else len(PHASES)
