"""Timeline of one traced step: work of the ranks of each pool during the step, also their work for other steps."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rlhf_planning.numbers import duration
from rlhf_trainer.report import plots
from rlhf_trainer.report.bars import Bar
from rlhf_trainer.report.metrics import PHASES
from rlhf_trainer.report.run_record import Event, JobRecord

MAX_LANES = 8
"""Most ranks that are all drawn; of more ranks only the first of each pool is drawn."""
MAX_NAME = 22
"""Most letters of the name of a rank's row in the picture; a longer name is cut."""
CONTROLLER, TRANSFER = "controller", "transfer"
"""Phases of a step in which no rank computes: the controller's own work, and moving or awaiting data."""
Lane = tuple[str, Sequence[Bar]]
"""Row of a rank: its name with the share of the step in which the rank waits, and bars with the longest first."""


@dataclass(frozen=True)
class StepTimeline:
    """Picture of a traced step, with a row (lane) for each rank."""

    step: int
    seconds: float
    lanes: Sequence[Lane]
    phases: Sequence[tuple[str, int]]
    """(name, index of its colour) of each phase that is drawn."""
    later: int
    """Last step for which ranks worked in this step's time; above `step` if they worked ahead."""

    def plot(self) -> Markup:
        """Draw the step: a row for each rank, with a bar for each piece of its work."""
        return plots.timeline(f"step {self.step}", self.lanes, self.seconds)


def step_timeline(job: JobRecord) -> StepTimeline | None:
    """Return the timeline of the traced step of median length, if possible not the first; None if none is whole."""
    span = _median_step(job)
    if span is None:
        return None
    length = span.end - span.start
    events = [
        event._replace(start=max(event.start, span.start) - span.start, end=min(event.end, span.end) - span.start)
        for event in job.trace
        if event.phase != CONTROLLER and event.start < span.end and event.end > span.start
    ]
    done = [event for event in events if event.phase != TRANSFER]
    drawn = {_colour(event.phase): event.phase if event.phase in PHASES else "other" for event in done}
    return StepTimeline(
        step=span.step,
        seconds=length,
        lanes=list(_lanes(events, span.step, length)),
        phases=[(drawn[colour], colour) for colour in sorted(drawn)],
        later=max((event.step for event in done), default=span.step),
    )


def _median_step(job: JobRecord) -> Event | None:
    """Return the controller's event of the step that is drawn; see `step_timeline`."""
    spans = {event.step: event for event in job.trace if event.phase == CONTROLLER and event.name.startswith("step ")}
    ahead = int((job.spec.get("rollout") or {}).get("maxStaleness") or 0)  # these steps must be traced, too
    whole = [span for step, span in spans.items() if step + ahead in spans]
    by_length = sorted(whole[1:] or whole, key=lambda span: span.end - span.start)
    return by_length[len(by_length) // 2] if by_length else None


def _lanes(events: Sequence[Event], step: int, seconds: float) -> Iterator[Lane]:
    """Yield the row of each rank that worked or, if there are more than MAX_LANES, of the first rank of each pool."""
    ranks = sorted({(event.pool, event.rank) for event in events if event.phase != TRANSFER})
    sizes = Counter(pool for pool, _ in ranks)
    for pool, rank in ranks:
        if len(ranks) > MAX_LANES and rank:
            continue
        name = pool[:MAX_NAME] if pool and sizes[pool] == 1 else f"{pool[: MAX_NAME - 8]} rank {rank}".strip()
        its = [event for event in events if (event.pool, event.rank) == (pool, rank)]
        yield _lane(name, its, step, seconds)


def _lane(name: str, events: Sequence[Event], step: int, seconds: float) -> Lane:
    """Return the row of a rank with these events; a bar's label names the event's step if that is not `step`."""
    waited = [event for event in events if event.phase == TRANSFER]
    done = sorted((event for event in events if event.phase != TRANSFER), key=lambda each: each.start - each.end)
    worked = _covered(events) - _covered(waited)
    bars = []
    for event in done:
        later = f" for step {event.step}" if event.step != step else ""
        colour, labels = plots.SERIES[_colour(event.phase)], (event.phase + later, event.phase)
        hover = f"{event.name}{later}: {duration(event.end - event.start)}"
        bars.append(Bar(start=event.start, end=event.end, colour=colour, labels=labels, hover=hover))
    return f"{name}  {1 - worked / seconds:.0%}", bars


def _covered(events: Sequence[Event]) -> float:
    """Return the seconds during which at least one of the events lasts."""
    total, reached = 0.0, 0.0
    for event in sorted(events, key=lambda each: each.start):
        total += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    return total


def _colour(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)
