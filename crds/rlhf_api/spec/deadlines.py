"""Deadlines that follow from the seconds of a step, where the user has set none."""

STEPS = 10
"""A call or a step that takes as long as so many steps counts as hung."""
CALL_SECONDS = 300, 1800
"""Bounds of the deadline of a step's call. All other calls, and steps without a prediction, have the upper one."""
STEP_SECONDS = 300, 3600
"""Bounds of the time between two steps. The wait for a checkpoint is added, but not above the upper one."""


def deadline_by(step_seconds: float, bounds: tuple[int, int]) -> int:
    """Return `STEPS` times the seconds of a step, within bounds."""
    least, most = bounds
    return int(min(max(STEPS * step_seconds, least), most))
