"""Meaning and remedy of each word of a job's status; status_table.yaml has them, and docs/status.md shows them."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from rlhf_api.spec.run_policy import Action, Reason
from rlhf_api.status import ConditionType, Phase
from rlhf_api.tables import read_table


class Row(NamedTuple):
    """Meaning of a word, in Markdown, and its remedy, in which {job} stands for the job's name."""

    means: str
    remedy: str = ""


class StatusTable(NamedTuple):
    """Rows of each kind of word; the key of a condition's row is status and reason, such as `False InvalidSpec`."""

    phases: Mapping[Phase, str]
    about: Mapping[ConditionType, str]
    conditions: Mapping[ConditionType, Mapping[str, Row]]
    failures: Mapping[Reason, Row]
    actions: Mapping[Action, str]
    events: Mapping[str, str]
    exit_codes: Mapping[int, Row]


TABLE: Final = read_table(__package__, "status_table.yaml", StatusTable)
CONDITIONS: Final[Mapping[tuple[str, str], str]] = {
    (kind, key.split()[1]): row.remedy for kind, rows in TABLE.conditions.items() for key, row in rows.items()
}
FAILURES: Final[Mapping[str, str]] = {reason: row.remedy for reason, row in TABLE.failures.items()}
