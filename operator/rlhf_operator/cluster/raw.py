"""Readers of values in untrusted JSON: a missing value, or one of another type, counts as empty and is no error."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from rlhf_operator.snapshot import Document
from rlhf_operator.times import parsed

LONG_AGO = datetime.fromtimestamp(0, UTC)


class Listing(NamedTuple):
    """Objects of a list, and the resource version of the list."""

    items: tuple[Document, ...]
    version: int


def at(value: object, *path: str) -> Any:
    """Return the value at a path of keys in nested objects; None if the path leads nowhere."""
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def text(value: object, *path: str) -> str:
    """Return the text at a path of keys; empty if there is none."""
    found = at(value, *path)
    return found if isinstance(found, str) else ""


def number(value: object, *path: str) -> int | None:
    """Return the integer at a path of keys; None for anything else, also for true and false."""
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def mapping(value: object, *path: str) -> Document:
    """Return the object at a path of keys; empty if there is none."""
    found = at(value, *path)
    return found if isinstance(found, Mapping) else {}


def texts(value: object, *path: str) -> dict[str, str]:
    """Return the entries with text values of the object at a path, such as labels."""
    return {key: each for key, each in mapping(value, *path).items() if isinstance(each, str)}


def entries(value: object, *path: str) -> Iterator[Document]:
    found = at(value, *path)
    return (each for each in (found if isinstance(found, list) else []) if isinstance(each, Mapping))


def time(value: object, *path: str) -> datetime | None:
    """Return the RFC 3339 time at a path; None if it is no valid time."""
    return parsed(text(value, *path))


def find_condition(value: object, kind: str) -> Document:
    """Return the condition of a type in .status.conditions; empty if there is none."""
    found = (each for each in entries(value, "status", "conditions") if each.get("type") == kind)
    return next(found, {})
