"""Page docs/status.md: every phase, condition, reason of a failure, event and exit code of a job."""

import re
from collections.abc import Iterable, Iterator
from typing import get_args

from rlhf_api.status import ConditionType
from rlhf_kubectl.why import TABLE
from rlhf_operator.evidence import CLASSES

HEAD = """\
<!-- Made from operator/rlhf_kubectl/status_table.yaml by `make generate`; do not edit. -->

# Words of a job's status

For readers who look up a phase, condition, reason or exit code; [follow a job](jobs.md) says how to read
them. `kubectl rlhf why JOB` prints what to do, too. Fields of `spec.runPolicy` stand here without that path.

"""
FAILURES = """
## Why attempts fail

`status.lastFailure` and `status.attempts` (the last ten) have the reason, the pod and its node, the
trainer's [exit code](#exit-codes) and its last words. The default action holds unless a
[rule of the job](jobs.md#rules-of-a-job) says another one.

"""
ORDER = """
The first match decides: exit code 2, 3, 5, 6 or 7; what was done to a pod (preempted, node lost, evicted,
out of memory, in this order); another exit code; a lost head or worker; a container that cannot start; a
deadline. A pod that only generates counts only if the trainer ends too, or if its new pod cannot start
([rollouts](rollouts.md#when-a-rank-is-lost)).

### What follows a failure

"""
EVENTS = """
## Events

`kubectl events --for rlhfjob/JOB` shows each new phase, each new reason of a condition that hinders the
job, the reason of each failed attempt, and these:

"""
EXIT_CODES = """
## Exit codes

Of `rlhf run` on a laptop and of the trainer in a pod.

"""
Cells = tuple[str, ...]
CODE = re.compile(
    r"(?<!`)(?:\bspec(?:\.[\w<>]+)+|\bkubectl rlhf \w+ JOB|\bkubectl (?:get|describe) [\w,]+(?: -A)?|--debug)"
)
"""Pattern of fields and commands in remedies, which are plain text; the page marks them as code."""


def text() -> str:
    """Return the whole page."""
    parts = [
        f"{HEAD}## Phases\n\nScripts should use the [conditions](#conditions), which the phase summarises.\n\n",
        table(("phase", "what it means"), ((f"`{name}`", means) for name, means in TABLE.phases.items())),
        "\n## Conditions\n\nA missing condition has not been checked yet.\n",
        *map(_condition, get_args(ConditionType)),
        FAILURES,
        table(
            ("reason", "default", "exit code", "what it means", "what to do"),
            (
                (
                    f"`{reason}`",
                    CLASSES[reason].action,
                    ", ".join(map(str, CLASSES[reason].exit_codes)),
                    row.means,
                    row.remedy,
                )
                for reason, row in TABLE.failures.items()
            ),
        ),
        ORDER,
        table(("action", "what follows"), ((f"`{action}`", means) for action, means in TABLE.actions.items())),
        EVENTS,
        table(("event", "what it means"), ((f"`{event}`", means) for event, means in TABLE.events.items())),
        EXIT_CODES,
        table(
            ("code", "what it means", "what to do"),
            ((str(code), row.means, row.remedy) for code, row in TABLE.exit_codes.items()),
        ),
    ]
    return "".join(parts)


def _condition(kind: ConditionType) -> str:
    rows = TABLE.conditions[kind]
    cells = ((*key.split(), row.means, row.remedy) for key, row in rows.items())
    listed = ((status, f"`{reason}`", means, remedy) for status, reason, means, remedy in cells)
    found = table(("status", "reason", "what it means", "what to do"), listed)
    return f"\n### `{kind}`\n\n{TABLE.about[kind]}\n\n{found}"


def table(heads: Cells, rows: Iterable[Cells]) -> str:
    """Return a table in Markdown."""
    return "".join(_lines(heads, rows))


def _lines(heads: Cells, rows: Iterable[Cells]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n"
    for row in rows:
        filled = " | ".join(row).replace("{job}", "JOB").replace(" {start}", "")
        marked = CODE.sub(r"`\g<0>`", filled)
        yield f"| {marked} |\n"
