"""Lays a part of a pod template over another one, as Kubernetes merges patches; and the part that keeps off nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlhf_api.checks.pod_template import KEYS

REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
TERMS: Final = "nodeSelectorTerms"
"""One of them has to hold: of two such lists, one of each has to."""


def merged(base: Any, over: Any, field: str = "") -> Any:
    """`base` with what `over` says besides or instead; null says nothing. field: the name of what both are."""
    if isinstance(over, Mapping):
        known = base if isinstance(base, Mapping) else {}
        said = {name: value for name, value in over.items() if value is not None}
        return {**known, **{name: merged(known.get(name), value, name) for name, value in said.items()}}
    if not isinstance(over, list) or not all(isinstance(each, Mapping) for each in over):
        return over
    entries = base if isinstance(base, list) else []
    if field == TERMS:
        return [merged(one, other) for one in entries or [{}] for other in over]
    if key := KEYS.get(field):
        by_key = {each[key]: each for each in entries}
        for each in over:
            by_key[each[key]] = merged(by_key.get(each[key]), each)
        return list(by_key.values())
    added = [merged(None, each) for each in over]
    return entries + [each for each in added if each not in entries]


def keep_off(nodes: Sequence[str]) -> dict[str, Any]:
    """Fields of a pod that goes to none of these nodes."""
    if not nodes:
        return {}
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    return {"affinity": {"nodeAffinity": {REQUIRED: {TERMS: [{"matchFields": fields}]}}}}
