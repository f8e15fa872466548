"""Times as a status writes them, and the clock that gives the time."""

import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal

YEARS = range(1970, 9000)
"""Years of a valid moment; a span can then be added or subtracted without an overflow."""


class ServerClock:
    """Clock of the API server, by the Date of its answers; until the first answer this machine's clock counts."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()

    def now(self) -> datetime:
        return datetime.fromtimestamp(time.monotonic() + self._ahead, UTC)

    def observe(self, date: str | None, sent: float) -> None:
        """Adjust the clock by the header Date of an answer that came now. sent: time.monotonic() of the request."""
        try:
            shown = parsedate_to_datetime(date or "").timestamp()
        except ValueError:
            return
        earliest, latest = shown - time.monotonic(), shown + 1 - sent
        self._ahead = min(max(self._ahead, earliest), latest)


def timestamp(moment: datetime, timespec: Literal["seconds", "microseconds"] = "seconds") -> str:
    """Return a moment in RFC 3339, as Kubernetes writes times; events and Leases have microseconds."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec=timespec) + "Z"


def parsed(text: str | None) -> datetime | None:
    """Return the moment of a timestamp (RFC 3339); None if it has no zone, or no date of a year in YEARS."""
    try:
        written = datetime.fromisoformat(text or "")
        moment = written.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return moment if written.tzinfo and moment.year in YEARS else None


def since(moment: datetime | None, now: datetime) -> float:
    """Return the seconds from a moment to now; 0 without a moment, or if it lies ahead."""
    return max((now - moment).total_seconds(), 0.0) if moment else 0.0
