"""Formats of numbers, durations and texts for people."""

import math
from collections.abc import Sequence
from datetime import datetime

MINUS = "\N{MINUS SIGN}"
CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
MILLION = 1_000_000
LARGE = ((10**12, "T"), (10**9, "G"), (MILLION, "M"))
"""Units of large numbers, the largest first."""
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def number(value: float) -> str:
    """Format a number to about 3 digits, with commas, then M, G and T: 0.0123, 4.46, 36.2, 3,248, 6.04 M, 13.1 G."""
    return tick(value, 3)


def tick(value: float, digits: int = 4) -> str:
    """Format a number as the label of an axis, with `digits` significant digits."""
    if not math.isfinite(value):
        text = str(value)
    elif abs(value) >= MILLION:
        size, unit = next(pair for pair in LARGE if abs(value) >= pair[0])
        text = f"{value / size:,.{digits}g} {unit}"
    elif abs(value) >= min(10 ** (digits - 1), 1000):
        text = f"{value:,.{max(0, digits - 4)}f}"
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", MINUS)


def ticks(values: Sequence[float]) -> list[str]:
    """Format numbers as labels of an axis, with as many digits as neighbours need to differ."""
    for digits in range(4, 16):
        labels = [tick(value, digits) for value in values]
        if len(set(labels)) == len(set(values)):
            break
    return labels


def size_text(size: float) -> str:
    """Format a number of bytes with a decimal unit: 538 kB."""
    for unit in UNITS:
        if size < 1000 or unit == UNITS[-1]:
            break
        size /= 1000
    return f"{size:.3g} {unit}"


def signed(value: float) -> str:
    """Format the change of a number, always with its sign."""
    return ("+" if value >= 0 else MINUS) + number(abs(value))


def duration(seconds: float) -> str:
    """Return a duration: 84 ms, 1.53 s, 41 s, 3 min 05 s, 2 h 07 min."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 10:
        return f"{number(seconds)} s" if seconds >= 1 else f"{number(1000 * seconds)} ms"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def between(start: str | None, end: str | None) -> float | None:
    """Return the seconds between two RFC 3339 times; None if one is missing."""
    if not start or not end:
        return None
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


def shortened(text: str, limit: int) -> str:
    """Return the text, or its first `limit` characters and how many follow; control characters become visible."""
    text = text.translate(CONTROL_PICTURES)
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def step_list(steps: list[int]) -> str:
    """Return a list of steps in words: `step 3`, or `14 steps, 3 to 25`."""
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
