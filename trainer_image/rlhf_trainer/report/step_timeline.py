"""When each pool worked in one step: what its ranks did in the step's time, also for other steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhf_planning.numbers import duration
from rlhf_planning.timeline import marks_of
from rlhf_trainer.report.metrics import PHASES
from rlhf_trainer.report.run_record import JobRecord
from rlhf_trainer.report.trace_events import Event

MOST_LANES = 8
"""With more ranks than that, only the first of each pool is drawn."""
WIDTH, NAMES, LANE, LETTER = 960.0, 150.0, 26.0, 6.2
"""In pixels: of the picture, of the names of the lanes, height of a lane, and width of a letter."""
NAME = 22
"""Letters of a lane's name; a longer one is cut."""
CONTROLLER, TRANSFER = "controller", "transfer"
"""Phases in which no rank works."""


@dataclass(frozen=True)
class Bar:
    """A phase of a rank."""

    x: float
    width: float
    colour: int
    """Number of its colour."""
    label: str
    """What stands in it; empty where there is no room."""
    hover: str


@dataclass(frozen=True)
class Lane:
    """A rank."""

    name: str
    y: float
    bars: Sequence[Bar]
    waits: str
    """Its share of the step in which it does nothing."""


@dataclass(frozen=True)
class StepTimeline:
    """A step."""

    step: int
    seconds: float
    lanes: Sequence[Lane]
    marks: Sequence[tuple[float, str]]
    """Place and text of the marks of the time axis."""
    phases: Sequence[tuple[str, int]]
    """Name and number of the colour of the phases that are drawn."""
    later: int
    """The last step that some of it was done for."""
    left: float = NAMES
    width: float = WIDTH
    lane: float = LANE

    @property
    def bottom(self) -> float:
        """Of the lanes."""
        return self.lane * len(self.lanes)


def step_timeline(job: JobRecord) -> StepTimeline | None:
    """Of a step of median length among those that were traced, but the first; None where none was."""
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
        marks=[(_x(seconds, end - start), label) for seconds, label in marks_of(end - start, most=9)],
        phases=[(drawn[colour], colour) for colour in sorted(drawn)],
        later=max((event.step for event in done), default=step),
    )


def _lanes(done: Sequence[Event], waits: Sequence[Event], step: int, seconds: float) -> Iterator[Lane]:
    ranks = sorted({(event.pool, event.rank) for event in done})
    shown = ranks if len(ranks) <= MOST_LANES else [(pool, rank) for pool, rank in ranks if rank == 0]
    for place, (pool, rank) in enumerate(shown):
        own, waited = ([each for each in some if (each.pool, each.rank) == (pool, rank)] for some in (done, waits))
        of_pool = sum(other == pool for other, _ in ranks)
        worked = _covered([*own, *waited]) - _covered(waited)
        yield Lane(
            name=pool[:NAME] if pool and of_pool == 1 else f"{pool[: NAME - 8]} rank {rank}".strip(),
            y=LANE * place,
            bars=[_bar(event, step, seconds) for event in sorted(own, key=lambda each: each.start - each.end)],
            waits=f"{1 - worked / seconds:.0%}",
        )


def _covered(events: Sequence[Event]) -> float:
    """Seconds in which there is an event."""
    total, reached = 0.0, 0.0
    for event in sorted(events, key=lambda each: each.start):
        total += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    return total


def _bar(event: Event, step: int, seconds: float) -> Bar:
    x, took = _x(event.start, seconds), event.end - event.start
    width = max(1.0, _x(event.end, seconds) - x)
    later = f" for step {event.step}" if event.step != step else ""
    label = next((text for text in (event.phase + later, event.phase) if len(text) * LETTER + 8 <= width), "")
    return Bar(x, width, _colour(event.phase), label, f"{event.name}{later}: {duration(took)}")


def _x(seconds: float, whole: float) -> float:
    """The place of a time."""
    return NAMES + (WIDTH - NAMES - 50) * seconds / whole


def _colour(phase: str) -> int:
    """That of the phase in the other plots."""
    return PHASES.index(phase) if phase in PHASES else len(PHASES)
