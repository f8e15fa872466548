"""Comparison of an edited job with its earlier version: only the same experiment may go on from its checkpoint."""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rlhf_api.problems import Problem
from rlhf_api.tables import read_table

FIELDS = read_table(__package__, "may_change.yaml", dict[str, tuple[str, ...]])
MAY_CHANGE = ("metadata", *(f"{above}.{field}" for above, fields in FIELDS.items() for field in fields))
"""Paths of fields that do not change a run's results beyond rounding; fields below such a path do not either."""
LENGTHS = ("spec.training.totalSteps", "spec.training.totalEpochs")


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[Problem]:
    """Return a problem for each field that makes `after` another experiment than `before`; both are resolved documents.

    The length of training may change where no learning rate depends on it (every schedule is Constant).
    """
    models = (model for model in (after["spec"]["models"] or {}).values() if isinstance(model, dict))
    fixed_length = any(each["schedule"] != "Constant" for model in models if (each := model.get("optimizer")))
    fields = (field for field in differing_paths(before, after) if fixed_length or field not in LENGTHS)
    return [Problem(field, _sentence(field)) for field in fields if not may_change(field)]


def identity(document: dict[str, Any], inputs: Mapping[str, str]) -> str:
    """Return a hash of the experiment; fields that may change do not count.

    inputs: name -> hash (identity) of each job whose output this job reads.
    """
    values = {field: value for field, value in leaves(document) if not may_change(field)}
    return hashlib.sha256(json.dumps([values, dict(inputs)], sort_keys=True).encode()).hexdigest()


def differing_paths(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the paths at which two documents differ; lists of different lengths differ as a whole."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        one, other = _by_name(one), _by_name(other)
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if one == other else [path]
    return [
        found
        for name in dict.fromkeys((*one, *other))
        for found in differing_paths(one.get(name), other.get(name), f"{path}.{name}" if path else name)
    ]


def _by_name(value: Any) -> Any:
    """Return a list or tuple as a mapping from index (as text) to entry, and other values unchanged."""
    return {str(place): entry for place, entry in enumerate(value)} if isinstance(value, list | tuple) else value


@lru_cache(maxsize=4096)
def may_change(path: str) -> bool:
    """Whether a change of the field at `path`, or of fields below it, leaves the job the same experiment."""
    return any(each.count(".") <= path.count(".") and is_prefix(each, path) for each in MAY_CHANGE)


def is_prefix(one: str, other: str) -> bool:
    """Whether the shorter path is a prefix of the longer one (`*` matches any name)."""
    return all(a == b or "*" in (a, b) for a, b in zip(one.split("."), other.split("."), strict=False))


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return (path, value) of every scalar, empty mapping and empty list in a document."""
    entries = _by_name(value)
    if not (entries and isinstance(entries, dict)):
        return [(path, value)]
    return [leaf for name in entries for leaf in leaves(entries[name], f"{path}.{name}" if path else name)]


def _sentence(field: str) -> str:
    why = ", and a schedule depends on it" if field in LENGTHS else ""
    return f"is not what it was when the job began{why}; use another --output, or --restart"
