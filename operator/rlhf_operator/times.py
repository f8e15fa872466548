"""Times as a status writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> datetime:
    return datetime.now(UTC)


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
