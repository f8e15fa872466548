"""Comparison of jobs, of run folders or of a cluster: rows of values side by side, and of the fields that differ."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlhf_api.checks.resume import leaves
from rlhf_api.status import Status
from rlhf_planning.numbers import number, shortened, signed

MAX_CHARACTERS = 300


class Row(NamedTuple):
    """Row of a comparison table, which has a column for each run or job."""

    name: str
    values: list[str]
    change: str = ""
    """Change of the value from the first to the second of two; else empty."""


def row_of(name: str, values: Mapping[int, str], count: int, change: str = "") -> Row:
    """Return a row of `count` columns; values: index of a column -> its text; others are empty."""
    return Row(name, [values.get(place, "") for place in range(count)], change)


def measures(found: Mapping[int, Mapping[str, object]], count: int) -> list[Row]:
    """Return a row for each measure, with its change if both of two have it; found: index of a column -> measures."""
    rows = []
    for name in dict.fromkeys(name for values in found.values() for name in values):
        known = {place: value for place, values in found.items() if isinstance(value := values.get(name), int | float)}
        change = signed(known[1] - known[0]) if count == len(known) == 2 else ""
        rows.append(row_of(name, {place: number(value) for place, value in known.items()}, count, change))
    return rows


def differences(documents: Mapping[int, Mapping[str, Any]], count: int) -> list[Row]:
    """Return a row for each field that differs between documents; `documents`: index of a column -> its document."""
    flat = {place: dict(leaves(dict(document))) for place, document in documents.items() if document}
    paths = dict.fromkeys(path for fields in flat.values() for path in fields)
    return [
        row_of(path, {place: _text_of(fields.get(path)) for place, fields in flat.items()}, count)
        for path in paths
        if len({_text_of(fields.get(path)) for fields in flat.values()}) > 1
    ]


def contents(status: Status) -> dict[str, str | None]:
    """Return name -> digest, or commit, of what a job reads: two jobs may read other content at one URI."""
    return {each.name: each.digest or each.revision for each in status.inputs}


def _text_of(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shortened(text, MAX_CHARACTERS) if value is not None else "unset"
