"""Times as a status writes them, and the clock that they are read from."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


class ServerClock:
    """The API server's time, by the Date of its answers: a clock of this machine that is wrong decides nothing.

    Until the first answer it is this machine's.
    """

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()

    def now(self) -> datetime:
        return datetime.fromtimestamp(time.monotonic() + self._ahead, UTC)

    def observe(self, date: str | None, sent: float) -> None:
        """An answer came now; date: its header Date, in whole seconds; sent: time.monotonic() of the request."""
        try:
            shown = parsedate_to_datetime(date or "").timestamp()
        except ValueError:
            return
        earliest, latest = shown - time.monotonic(), shown + 1 - sent
        self._ahead = min(max(self._ahead, earliest), latest)


def timestamp(moment: datetime) -> str:
    """RFC 3339 to the second, as Kubernetes writes times."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def parsed(text: str | None) -> datetime | None:
    """The moment that a timestamp names; None where it names none, such as a thirteenth month."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC) if text else None
    except (ValueError, OverflowError):
        return None


def since(moment: datetime | None, now: datetime) -> float:
    """Seconds from a moment to now; 0 where there is none, or where it lies ahead."""
    return max((now - moment).total_seconds(), 0.0) if moment else 0.0
