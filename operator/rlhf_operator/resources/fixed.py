"""Parts of manifests that are the same for every job, from `fixed.yaml` beside this module."""

from copy import deepcopy
from typing import Any, Final

from rlhf_api.tables import read_table

_PARTS: Final = read_table(__package__, "fixed.yaml", dict[str, dict[str, Any]])


def fixed_part(name: str) -> dict[str, Any]:
    """Return a part of a manifest by its name in fixed.yaml, as a copy that the caller may change."""
    return deepcopy(_PARTS[name])
