"""Deadlines that follow from the seconds of a step, where the user has set none."""

STEPS = 10
"""A call or a step that takes as long as so many steps counts as hung."""
CALL_SECONDS = 300, 1800
"""Bounds of the deadline of a call of a step; the upper one is that of all other calls, and of steps not predicted."""
STEP_SECONDS = 300, 3600
"""Bounds of the time from one step to the next, without the wait for a checkpoint; the upper one with it."""


def deadline_by(step_seconds: float, bounds: tuple[int, int]) -> int:
    """Return `STEPS` times the seconds of a step, within bounds."""
    least, most = bounds
    return int(min(max(STEPS * step_seconds, least), most))
