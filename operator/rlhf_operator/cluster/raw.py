"""Values from JSON that anybody may have written: a missing value, or one of another type, is empty and no error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rlhf_operator.snapshot import Document

LONG_AGO = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All objects of a list, and the version of the server's state that it shows."""

    items: tuple[Document, ...]
    version: int


def at(value: object, *path: str) -> Any:
    """Return the value at a path of keys; None if the path leads nowhere."""
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def text(value: object, *path: str) -> str:
    """A text; else empty."""
    found = at(value, *path)
    return found if isinstance(found, str) else ""


def number(value: object, *path: str) -> int | None:
    """A whole number; a truth value is none."""
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def mapping(value: object, *path: str) -> Document:
    """An object; else empty."""
    found = at(value, *path)
    return found if isinstance(found, Mapping) else {}


def texts(value: object, *path: str) -> dict[str, str]:
    """The entries of an object whose values are texts, such as labels."""
    return {key: each for key, each in mapping(value, *path).items() if isinstance(each, str)}


def entries(value: object, *path: str) -> Iterator[Document]:
    """The objects in a list."""
    found = at(value, *path)
    return (each for each in (found if isinstance(found, list) else []) if isinstance(each, Mapping))


def time(value: object, *path: str) -> datetime | None:
    """A time of RFC 3339, of 1970 at the earliest; None for anything else, and for a time without a zone."""
    try:
        found = datetime.fromisoformat(text(value, *path))
    except ValueError:
        return None
    try:
        return max(found.astimezone(UTC), LONG_AGO) if found.tzinfo else None
    except OverflowError:
        return None


def condition(value: object, kind: str) -> Document:
    """The condition of a type in .status.conditions; empty where there is none."""
    found = (each for each in entries(value, "status", "conditions") if each.get("type") == kind)
    return next(found, {})


def is_true(value: object, kind: str) -> bool:
    """Whether the condition of a type is True."""
    return condition(value, kind).get("status") == "True"
