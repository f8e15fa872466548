"""Comparison of jobs, of run folders or of a cluster: rows of values side by side, and of the fields that differ."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_api.checks.resume import leaves
from rlhf_api.status import Status
from rlhf_planning.numbers import number, shortened, signed

MAX_CHARACTERS = 300
NO_MEASURES, NULL = ("steps", "seconds", "seed", "best_step", "end_tokens"), "win_rate_null"
"""Entries of summary.json that are no measures; and the entry of a model's win rate against itself."""


class Row(NamedTuple):
    """Row of a comparison table, which has a column for each run or job."""

    name: str
    values: list[str]
    change: str = ""
    """Change of the value from the first to the second of two; else empty."""


def measures(found: Sequence[Mapping[str, object]]) -> list[Row]:
    """Return a row for each measure of the columns `found`, with its change if both of two have it."""
    rows = []
    for name in dict.fromkeys(name for values in found for name in values):
        known = [value if isinstance(value := values.get(name), int | float) else None for values in found]
        before, after = known if len(known) == 2 else (None, None)
        change = "" if before is None or after is None else signed(after - before)
        rows.append(Row(name, ["" if value is None else number(value) for value in known], change))
    return rows


def differences(documents: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each field that differs between documents; an empty document is unknown, with empty cells."""
    flat = [dict(leaves(dict(document))) if document else {} for document in documents]
    rows = []
    for path in dict.fromkeys(path for fields in flat for path in fields):
        texts = [_text_of(fields.get(path)) if fields else "" for fields in flat]
        if len({text for text, fields in zip(texts, flat, strict=True) if fields}) > 1:
            rows.append(Row(path, texts))
    return rows


def before_and_after(summary: Mapping[str, object]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the measures in a job's part of summary.json by name: (before training, after it or taken once)."""
    values = {name: float(value) for name, value in summary.items() if isinstance(value, int | float)}
    before = {name.removesuffix("_before"): value for name, value in values.items() if name.endswith("_before")}
    before |= {"win_rate": values[NULL]} if NULL in values else {}
    after = {name: values[f"{name}_after"] for name in before if f"{name}_after" in values}
    known = (*NO_MEASURES, NULL, *(f"{name}_{when}" for name in after for when in ("before", "after")))
    return before, after | {name: value for name, value in values.items() if name not in known}


def contents(status: Status) -> dict[str, str | None]:
    """Return name -> digest, or commit, of each input of a job: the content at a URI may change."""
    return {each.name: each.digest or each.revision for each in status.inputs}


def _text_of(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shortened(text, MAX_CHARACTERS) if value is not None else "unset"
