"""Remedies for each reason of a condition and of a failure; docs/jobs.md says more about the same reasons."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from rlhf_api.spec.run_policy import Reason
from rlhf_api.status import ConditionType
from rlhf_api.tables import read_table


class Remedies(NamedTuple):
    """Texts of remedies.yaml: the remedy by condition and reason, and by the reason of a failure."""

    conditions: Mapping[ConditionType, Mapping[str, str]]
    failures: Mapping[Reason, str]


_REMEDIES: Final = read_table(__package__, "remedies.yaml", Remedies)
CONDITIONS: Final[Mapping[tuple[str, str], str]] = {
    (condition, reason): remedy for condition, row in _REMEDIES.conditions.items() for reason, remedy in row.items()
}
"""Remedy by (condition, reason), in which {job} stands for the job's name; a reason may lack a remedy, or have ""."""
FAILURES: Final = _REMEDIES.failures
