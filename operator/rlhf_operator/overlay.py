"""Overlays of pod templates, merged as Kubernetes merges patches; and the overlay that avoids nodes."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlhf_api.checks.pod_template import KEYS

REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
TERMS: Final = "nodeSelectorTerms"
"""Field with the alternative terms of a node affinity; merging combines each old term with each new one."""
SCALARS: Final = (str, int, float, type(None))
OBJECTS: Final = (dict, Mapping)
"""Types of a document's objects. `isinstance` finds dict at once, but takes long for an abstract class."""


def merged(base: Any, over: Any, field: str = "") -> Any:
    """Return `base` with the values of `over` merged in; nulls change nothing. field: name of their field."""
    if isinstance(over, SCALARS):
        return over
    if isinstance(over, OBJECTS):
        known = base if isinstance(base, OBJECTS) else {}
        given = {name: value for name, value in over.items() if value is not None}
        return {**known, **{name: merged(known.get(name), value, name) for name, value in given.items()}}
    if isinstance(over, list) and all(isinstance(each, OBJECTS) for each in over):
        return _merged_entries(base if isinstance(base, list) else [], over, field)
    return over


def _merged_entries(entries: list[Any], over: list[Any], field: str) -> list[Any]:
    """Merge two lists of objects: entries with equal keys are merged; without keys, new entries are appended."""
    if field == TERMS:
        return [merged(one, other) for one in entries or [{}] for other in over]
    if key := KEYS.get(field):
        by_key = {each[key]: each for each in entries}
        for each in over:
            by_key[each[key]] = merged(by_key.get(each[key]), each)
        return list(by_key.values())
    added = [merged(None, each) for each in over]
    return entries + [each for each in added if each not in entries]


def avoid_nodes(nodes: Sequence[str]) -> dict[str, Any]:
    """Return the pod fields that keep a pod off these nodes."""
    if not nodes:
        return {}
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    return {"affinity": {"nodeAffinity": {REQUIRED: {TERMS: [{"matchFields": fields}]}}}}
