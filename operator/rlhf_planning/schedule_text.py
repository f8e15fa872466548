"""Text of the schedules of one optimizer step of actor and critic on pipeline stages, fused and one after the other."""

from collections.abc import Iterator, Sequence

from rlhf_mapper.fused_schedule import FusedUpdates, Pass
from rlhf_planning.timeline import IDLE, seconds_text

LETTERS = ("Aa", "Cc")
"""Letters of forward and backward pass in the lines of ranks, by model: actor and critic."""
MAX_RANKS = 8
"""Most ranks of a pipeline that have a line."""


def schedule_lines(updates: FusedUpdates, *, columns: int) -> Iterator[str]:
    """Yield a line for each rank without and with fusion, on one scale of time, and the meaning of the letters."""
    whole = updates.alone.seconds
    for name, schedule in (("one after the other", updates.alone), ("fused", updates.schedule)):
        yield f"  {name}: {seconds_text(schedule.seconds)}"
        for rank, passes in enumerate(schedule.ranks[:MAX_RANKS]):
            head = f"    rank {rank}  "
            yield head + _line(passes, (columns - len(head)) / whole)
    yield f"  A, C: forward passes of actor and critic; a, c: backward passes; {IDLE}: the rank waits"


def _line(passes: Sequence[Pass], cells_of_a_second: float) -> str:
    cells: list[str] = []
    for each in passes:
        start, end = (round(second * cells_of_a_second) for second in (each.start, each.end))
        cells += [IDLE] * (start - len(cells)) + [LETTERS[each.model][each.is_backward]] * (end - start)
    return "".join(cells)
