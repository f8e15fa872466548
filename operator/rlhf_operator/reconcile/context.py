"""One reconcile pass over one job: its snapshot, and the status, actions and events that it has decided on so far."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Self

from pydantic import ValidationError

from rlhf_api.job import Job
from rlhf_api.names import API_VERSION, KIND
from rlhf_api.problems import SpecError
from rlhf_api.spec.custom_algorithm import ReadStep
from rlhf_api.spec.run_policy import RunPolicy
from rlhf_api.status import Attempt, Condition, ConditionType, Phase, Status
from rlhf_operator import conditions, names
from rlhf_operator.actions import Action, Event, Plan, ReadLive
from rlhf_operator.conditions import Truth
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import NodeRequest, ObservedRayJob, Snapshot
from rlhf_operator.times import parsed, since, timestamp

SHORTEST_REQUEUE: Final = 1.0
"""Seconds: no pass asks for the next one sooner."""
MAX_LISTED_ATTEMPTS: Final = 10
"""status.attempts keeps the newest ones; those that were withdrawn go first."""
FINAL: Final = frozenset({"Succeeded", "Failed"})
EXPLAINING_CONDITIONS: Final[Mapping[Phase, tuple[ConditionType, ...]]] = MappingProxyType(
    {
        "Pending": ("Accepted", "InputsReady"),
        "Mapping": ("Mapped",),
        "Queued": ("QuotaReserved",),
        "Provisioning": ("ClusterReady",),
        "Suspending": ("Suspended",),
        "Suspended": ("Suspended",),
        "Succeeded": ("Complete",),
        "Failed": ("Failed",),
    }
)
"""The condition whose message explains a phase; for all other phases that is Training."""

BEFORE_AN_ATTEMPT: Final[tuple[ConditionType, ...]] = ("Accepted", "InputsReady", "Mapped")
"""Conditions that must be True before a RayJob is created."""
WITH_EVENTS: Final[tuple[ConditionType, ...]] = (*BEFORE_AN_ATTEMPT, "ClusterReady")
"""A new reason of one of these is an event."""
FAILURE_LIMITS: Final = ("BackoffLimitExceeded", "FailureRule")
"""Reasons of Failed that say less than the failure of the last attempt."""
PHASES_WITHOUT_EVENT: Final = frozenset({"Pending", "Mapping"})
"""In these phases one of the conditions above is False, and its reason has an event of its own."""
INPUT_NOT_READY: Final = "InputNotReady"
NO_WARNINGS: Final = frozenset({INPUT_NOT_READY, conditions.READING_SHAPES})
"""Reasons that need no action: the job waits for another job, or for its own pod."""
ON_ITS_WAY: Final = frozenset({"Starting", "Queued", "PodsPending", conditions.KEPT, "Ended"})
"""Reasons of ClusterReady=False that need no event of their own."""


class NodeDemand(NamedTuple):
    """Demand of a job in line."""

    nodes: frozenset[str]
    """Names of the nodes that its workers may use."""
    priority: int
    """Priority of its worker pods."""


class NeedsLiveReadError(Exception):
    """The next step cannot be undone, and the snapshot came from the cache: read the objects live first."""

    def __init__(self, why: str, *, alone: bool) -> None:
        self.look = ReadLive(why=why, alone=alone)
        super().__init__(why)


class NotYetError(Exception):
    """An older job has not been looked at yet; its first pass is on its way, and brings this one back."""


@dataclass(kw_only=True)
class ReconcileContext:
    """One pass. `status` is the new status as it is built up; `snapshot.job.status` is the one in the API server."""

    snapshot: Snapshot
    now: datetime
    settings: Settings
    status: Status
    job: Job | None
    """None where the spec cannot be read; `problem` then says why."""
    problem: str
    policy: RunPolicy
    actions: list[Action] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    requeue_times: list[float] = field(default_factory=list)
    demands: dict[NodeRequest, NodeDemand] = field(default_factory=dict)
    """Demand by request, a cache of `line`."""

    @classmethod
    def of(cls, snapshot: Snapshot, now: datetime, settings: Settings) -> Self:
        """The context at the start of a pass."""
        job, problem = _job(snapshot)
        policy = job.spec.run_policy if job else _policy(snapshot)
        snapshot = _repaired(snapshot)
        draft = snapshot.job.status
        return cls(snapshot=snapshot, now=now, settings=settings, status=draft, job=job, problem=problem, policy=policy)

    def plan(self) -> Plan:
        """The result: adds the phase that follows from the conditions, and an event if the phase has changed."""
        before = self.snapshot.job.status.phase
        if not self.has_ended or before not in FINAL:
            phase = conditions.phase_of(self.status.conditions)
            generation = self.snapshot.job.generation
            self.set_status(
                phase=phase, reason=self._reason(phase), observed_generation=generation if generation >= 0 else None
            )
        self._add_obstacle_events()
        if self.status.phase != before and self.status.phase not in PHASES_WITHOUT_EVENT:
            kind: Literal["Normal", "Warning"] = "Warning" if self.status.phase == "Failed" else "Normal"
            self.events.append(Event(kind=kind, reason=self.status.phase, message=self._phase_message(before)))
        times = [max(wait, SHORTEST_REQUEUE) for wait in self.requeue_times]
        return Plan(
            status=self.status,
            actions=tuple(self.actions),
            events=tuple(self.events),
            requeue_after=min(times, default=None),
        )

    def _add_obstacle_events(self) -> None:
        """One event for each new reason why no attempt can start, or why its pods do not."""
        refused = self.snapshot.refused.reason if self.snapshot.refused else ""  # has its event already
        reported = {refused, *ON_ITS_WAY}
        for kind in WITH_EVENTS:
            was = conditions.found(self.snapshot.job.status.conditions, kind)
            now = self.condition(kind)
            is_new = was is None or now is None or (was.status, was.reason) != (now.status, now.reason)
            if now is not None and now.status == "False" and is_new and now.reason not in reported:
                self.add_event("Normal" if now.reason in NO_WARNINGS else "Warning", now.reason, now.message)

    def _reason(self, phase: Phase) -> str | None:
        """Return one word that says why the job is in its phase; None if the job just trains."""
        if (reason := self._failure_reason(phase)) is not None:
            return reason
        if phase == "Running" and self.holds("Stalled"):
            return "NoProgress"
        is_reached = phase in FINAL or phase == "Suspended"
        explaining = self._explaining(phase)
        return next((each.reason for each in explaining if each.status != "True" or is_reached), None)

    def _failure_reason(self, phase: Phase) -> str | None:
        """Reason of the current attempt's failure, if the phase follows from that failure."""
        failure, failed = self.status.last_failure, self.condition("Failed")
        if failure is None or failure.attempt != self.status.attempt:
            return None
        follows = phase == "Restarting" or (failed is not None and failed.reason in FAILURE_LIMITS)
        return failure.reason if follows else None

    def _explaining(self, phase: Phase) -> list[Condition]:
        """Return the conditions that explain a phase."""
        kinds = EXPLAINING_CONDITIONS.get(phase, ("Training",))
        return [each for kind in kinds if (each := self.condition(kind))]

    def _phase_message(self, before: str) -> str:
        """Message of the event about a new phase, from the condition that explains the phase."""
        messages = (each.message for each in self._explaining(self.status.phase))
        return next(filter(None, messages), f"The job was {before} before.")

    @property
    def has_ended(self) -> bool:
        """Whether the job has succeeded or failed, for good."""
        is_final = any(self.holds(kind) for kind in ("Complete", "Failed"))
        return is_final or self.status.phase in FINAL

    @property
    def record(self) -> Attempt | None:
        """The current attempt, as the status lists it."""
        last = self.status.attempts[-1] if self.status.attempts else None
        return last if last is not None and last.attempt == self.status.attempt else None

    @property
    def is_under_way(self) -> bool:
        """Whether an attempt has begun and not ended; one whose RayJob was never seen has not begun."""
        record, rayjob = self.record, self.snapshot.current_rayjob()
        is_running = record is not None and record.outcome == "Running"
        return is_running and (rayjob is not None or self.status.ray_job_name is not None)

    def set_status(self, **changes: Any) -> None:
        """Changes fields of the new status."""
        self.status = self.status.model_copy(update=changes)

    def set_record(self, **changes: Any) -> None:
        """Changes fields of the current attempt, if there is one."""
        if self.record is not None:
            self.set_status(attempts=(*self.status.attempts[:-1], self.record.model_copy(update=changes)))

    def begin_record(self, attempt: Attempt) -> None:
        """Adds an attempt; replaces its record where the operator died before it created the RayJob."""
        attempts = [*(each for each in self.status.attempts if each.attempt != attempt.attempt), attempt]
        while len(attempts) > MAX_LISTED_ATTEMPTS:
            attempts.remove(next((each for each in attempts if each.outcome == "Withdrawn"), attempts[0]))
        self.set_status(attempt=attempt.attempt, attempts=tuple(attempts))

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of this type."""
        return conditions.found(self.status.conditions, kind)

    def holds(self, kind: ConditionType) -> bool:
        """Whether a condition is True."""
        return conditions.holds(self.status.conditions, kind)

    def set_condition(self, kind: ConditionType, status: Truth, reason: str, message: str = "") -> None:
        """Sets the condition of this type."""
        new = conditions.condition(kind, status, reason, message, now=self.now, generation=self.snapshot.job.generation)
        self.set_status(conditions=conditions.merged(self.status.conditions, new, self.snapshot.job.status.conditions))

    def add_event(self, kind: Literal["Normal", "Warning"], reason: str, message: str, *, node: str = "") -> None:
        """Adds a Kubernetes event about the job, or about a node."""
        self.events.append(Event(kind=kind, reason=reason, message=conditions.shortened(message), node=node))

    def requeue_after(self, seconds: float) -> None:
        """Asks for another pass after so many seconds at the latest."""
        self.requeue_times.append(seconds)

    def require_live(self, why: str, *, alone: bool = False) -> None:
        """NeedsLiveReadError unless this pass has read job and RayJobs from the API server; `why` is for the log.

        alone: and unless no other job reserves room meanwhile.
        """
        if not self.snapshot.fresh or (alone and not self.snapshot.alone):
            raise NeedsLiveReadError(why, alone=alone)

    def age(self, moment: datetime | None) -> float:
        """Seconds since a moment."""
        return since(moment, self.now)

    def condition_since(self, kind: ConditionType, status: Truth = "True") -> datetime | None:
        """Return when a condition changed to this status; None if its status differs now."""
        each = self.condition(kind)
        return parsed(each.last_transition_time) if each and each.status == status else None


def _job(snapshot: Snapshot) -> tuple[Job | None, str]:
    job = snapshot.job
    try:
        return _parsed_job(job.name, job.namespace, json.dumps(job.spec), job.status.step), ""
    except SpecError as error:
        return None, str(error)
    except RecursionError:
        return None, "spec: is nested too deeply"


@lru_cache(maxsize=256)
def _parsed_job(name: str, namespace: str, spec: str, step: ReadStep | None) -> Job:
    """Parse a job with a spec in JSON; cached, because the passes over a job follow one another closely."""
    metadata = {"name": name, "namespace": namespace}
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": json.loads(spec)}
    return Job.parse(document, step=step)


def _policy(snapshot: Snapshot) -> RunPolicy:
    """Return runPolicy of a spec that is invalid as a whole."""
    try:
        return RunPolicy.model_validate(snapshot.job.spec.get("runPolicy", {}), by_alias=True, by_name=False)
    except (ValidationError, RecursionError):
        return RunPolicy()


def _repaired(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with the attempt numbers in the RayJobs' names, and with attempts missing from the status."""
    job = snapshot.job
    rayjobs = tuple(replace(each, attempt=_number(each, job.name)) for each in snapshot.rayjobs)
    newest = max((each for each in rayjobs if each.owned), key=lambda each: each.attempt, default=None)
    status, listed = job.status, {each.attempt for each in job.status.attempts}
    number = max(status.attempt or 0, *listed, 0)
    if newest is not None and newest.attempt >= max(number, 1) and newest.attempt not in listed:
        status = _with_lost_attempt(status, newest)
    else:
        status = status.model_copy(update={"attempt": number or status.attempt})
    ordered = tuple(sorted(status.attempts, key=lambda each: each.attempt))
    status = status.model_copy(update={"attempts": ordered})
    return replace(snapshot, job=replace(job, status=status), rayjobs=rayjobs)


def _number(rayjob: ObservedRayJob, job: str) -> int:
    """Return the attempt in a RayJob's name; 0 if the name is not one of the job's names."""
    number = rayjob.name.removeprefix(f"{job}-a")
    is_plain = number.isascii() and number.isdigit() and len(number) <= 9
    return int(number) if is_plain and rayjob.name == names.rayjob(job, int(number)) else 0


def _with_lost_attempt(status: Status, rayjob: ObservedRayJob) -> Status:
    """Return the status with the attempt of a RayJob added again."""
    slots = status.mapping.slots if status.mapping else 1
    record = Attempt(attempt=rayjob.attempt, start_time=timestamp(rayjob.created), slots=slots)
    attempts = (*status.attempts, record)[-MAX_LISTED_ATTEMPTS:]
    return status.model_copy(update={"attempt": rayjob.attempt, "attempts": attempts})
