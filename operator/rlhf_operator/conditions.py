"""The conditions of a job, and the phase that follows from them."""

from collections.abc import Sequence
from typing import Final, Literal

from rlhf_api.status import Condition, ConditionType, Phase, Status

Truth = Literal["True", "False", "Unknown"]
Kstatus = Literal["Current", "InProgress", "Failed"]
Conditions = tuple[Condition, ...]

RESTARTING = "Restarting"  # reason of Training=False between two attempts
SUSPENDING = "Suspending"  # reason of Suspended=False while pods of the suspended job are left
READING_SHAPES = "ReadingShapes"
READING = (READING_SHAPES, "PodsRefused", "QuotaExceeded")
"""Reasons of the condition Mapped=False while a pod reads the shapes of models, or while that pod cannot be made."""
WAITING = "WaitingForRoom"  # reason of QuotaReserved=False of a job that waits in line for room
SLOW_START = "ContainersWaiting"  # reason of ClusterReady=False while containers wait for longer than is usual
WAITING_FOR_NODES = "WaitingForNodes"  # reason of QuotaReserved=False while node groups add nodes for an attempt
KEPT = "Kept"  # reason of ClusterReady=False while the pods of a failed attempt stay for debugging
LONGEST_MESSAGE = 1024
LACKS: Final = ("", "False", "Unknown")
LADDER: Final[tuple[tuple[Phase, ConditionType, tuple[str, ...], str | None], ...]] = (
    ("Succeeded", "Complete", ("True",), None),
    ("Failed", "Failed", ("True",), None),
    ("Suspended", "Suspended", ("True",), None),
    ("Suspending", "Suspended", ("False",), SUSPENDING),
    ("Pending", "Accepted", LACKS, None),
    ("Pending", "InputsReady", LACKS, None),
    ("Mapping", "Mapped", LACKS, None),
    ("Restarting", "Training", ("False",), RESTARTING),
    ("WaitingForNodes", "QuotaReserved", ("False",), WAITING_FOR_NODES),
    ("Queued", "QuotaReserved", LACKS, None),
    ("Provisioning", "ClusterReady", LACKS, None),
    ("Initializing", "Training", ("", "False"), None),
)
"""Rows (phase, condition, statuses, reason or None for any). The first row whose condition has one of the statuses, and
the reason, decides the phase; its condition also explains the phase. An empty status stands for a missing condition.
"""


def merged(conditions: Sequence[Condition], new: Condition, standing: Sequence[Condition]) -> Conditions:
    """Return the conditions with `new` in place of the condition of the same type.

    standing: conditions as the API server has them. `new` takes over lastTransitionTime from the standing condition of
    the same type and status. The standing condition stays if only observedGeneration would change.
    """
    before = found(standing, new.type)
    if before is not None and before.status == new.status:
        new = new.model_copy(update={"last_transition_time": before.last_transition_time})
        if (before.reason, before.message) == (new.reason, new.message):
            new = before
    kept: dict[str, Condition] = {}
    for each in conditions:
        kept.setdefault(each.type, each)
    return tuple({**kept, new.type: new}.values())


def shortened(message: str) -> str:
    """Return a message, cut to the length that a status should hold."""
    return message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 3] + "..."


def found(conditions: Sequence[Condition], kind: ConditionType) -> Condition | None:
    """Return the condition of this type; None if there is none."""
    return next((each for each in conditions if each.type == kind), None)


def holds(conditions: Sequence[Condition], kind: ConditionType) -> bool:
    return (each := found(conditions, kind)) is not None and each.status == "True"


def keeps_pods(status: Status) -> bool:
    """Whether a job has failed and its pods stay for debugging."""
    ready = found(status.conditions, "ClusterReady") if status.phase == "Failed" else None
    return ready is not None and ready.reason == KEPT


def in_line(status: Status) -> bool:
    """Whether a job waits in the operator's line and lacks nothing but room."""
    reserved = found(status.conditions, "QuotaReserved") if status.phase == "Queued" else None
    return reserved is not None and reserved.reason == WAITING


def phase_of(conditions: Sequence[Condition]) -> Phase:
    """Return the phase, by the first condition that differs from those of a running job."""
    for phase, kind, statuses, reason in LADDER:
        each = found(conditions, kind)
        if (each.status if each else "") in statuses and reason in (None, each and each.reason):
            return phase
    return "Running"


def explaining(status: Status, phase: Phase) -> list[Condition]:
    """Return the conditions whose message explains a phase; a phase without a row is explained by Training."""
    kinds: list[ConditionType] = [kind for reached, kind, *_ in LADDER if reached == phase] or ["Training"]
    return [each for kind in kinds if (each := found(status.conditions, kind))]
