"""Lays a part of a pod template over another one, as Kubernetes merges patches; and the part that keeps off nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlhf_api.pod_template import KEYS

REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
TERMS: Final = "nodeSelectorTerms"
"""One of them has to hold: of two such lists, one of each has to."""


def merged(base: Any, over: Any, field: str = "") -> Any:
    """`base` with what `over` says besides or instead; null says nothing. field: the name of what both are."""
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        said = {name: value for name, value in over.items() if value is not None}
        return {**base, **{name: merged(base.get(name), value, name) for name, value in said.items()}}
    if not (isinstance(base, list) and isinstance(over, list)):
        return over
    if field == TERMS:
        return [merged(one, other) for one in base for other in over]
    if key := KEYS.get(field):
        entries = {each[key]: each for each in base}
        for each in over:
            entries[each[key]] = merged(entries.get(each[key]), each)
        return list(entries.values())
    if all(isinstance(each, Mapping) for each in over):
        return base + [each for each in over if each not in base]
    return over


def keep_off(nodes: Sequence[str]) -> dict[str, Any]:
    """Fields of a pod that goes to none of these nodes."""
    if not nodes:
        return {}
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    return {"affinity": {"nodeAffinity": {REQUIRED: {TERMS: [{"matchFields": fields}]}}}}
