"""One pass over one job: what it saw, and the plan as it grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, Literal, Self

from pydantic import ValidationError

from rlhf_api.job import Job
from rlhf_api.names import API_VERSION, KIND
from rlhf_api.problems import SpecError
from rlhf_api.run_policy import RunPolicy
from rlhf_api.status import Attempt, ConditionType, Phase, Status
from rlhf_operator import conditions, names
from rlhf_operator.conditions import Truth
from rlhf_operator.plan import Action, Event, Plan
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import RayJobSeen, Snapshot
from rlhf_operator.times import parsed, since, timestamp

SOONEST: Final = 1.0
"""Seconds; no pass calls for the next one sooner."""
MOST_ATTEMPTS: Final = 10
"""That a status lists."""
FINAL: Final = frozenset({"Succeeded", "Failed"})
TOLD_BY: Final[Mapping[Phase, tuple[ConditionType, ...]]] = MappingProxyType(
    {
        "Queued": ("QuotaReserved",),
        "Provisioning": ("ClusterReady",),
        "Suspending": ("Suspended",),
        "Suspended": ("Suspended",),
        "Succeeded": ("Complete",),
        "Failed": ("Failed",),
    }
)
"""The condition whose message explains a phase; of the others it is Training."""

BEFORE_AN_ATTEMPT: Final[tuple[ConditionType, ...]] = ("Accepted", "InputsReady", "Mapped")
"""Without these no RayJob is made."""
TOLD_BY_OBSTACLES: Final = frozenset({"Pending", "Mapping"})
"""Phases in which one of these conditions is False; its reason is the event."""
INPUT_NOT_READY: Final = "InputNotReady"
"""The only obstacle that asks nothing of anybody."""


class NeedsLiveError(Exception):
    """The next step cannot be taken back, and what was seen came from a cache."""


@dataclass(kw_only=True)
class Turn:
    """A pass. `status` is the draft of the one to write; `snapshot.job.status` is the one that stands."""

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
    waits: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, snapshot: Snapshot, now: datetime, settings: Settings) -> Self:
        """A pass in which nothing is decided yet."""
        job, problem = _job(snapshot)
        policy = job.spec.run_policy if job else _policy(snapshot)
        seen = _mended(snapshot)
        draft = seen.job.status
        return cls(snapshot=seen, now=now, settings=settings, status=draft, job=job, problem=problem, policy=policy)

    def plan(self) -> Plan:
        """What was decided, with the phase that follows from it and an event if that is another one."""
        before = self.snapshot.job.status.phase
        if not self.has_ended or before not in FINAL:
            phase = conditions.phase_of(self.status.conditions)
            generation = self.snapshot.job.generation
            self.set(phase=phase, observed_generation=generation if generation >= 0 else None)
        self._tell_obstacles()
        if self.status.phase != before and self.status.phase not in TOLD_BY_OBSTACLES:
            kind: Literal["Normal", "Warning"] = "Warning" if self.status.phase == "Failed" else "Normal"
            self.events.append(Event(kind=kind, reason=self.status.phase, message=self._sentence(before)))
        waits = [max(wait, SOONEST) for wait in self.waits]
        return Plan(
            status=self.status,
            actions=tuple(self.actions),
            events=tuple(self.events),
            again_after=min(waits, default=None),
        )

    def _tell_obstacles(self) -> None:
        """An event for each new reason why no attempt can begin."""
        refused = self.snapshot.refused.reason if self.snapshot.refused else ""  # told when it was
        for kind in BEFORE_AN_ATTEMPT:
            was = conditions.found(self.snapshot.job.status.conditions, kind)
            now = conditions.found(self.status.conditions, kind)
            is_new = was is None or now is None or (was.status, was.reason) != (now.status, now.reason)
            if now is not None and now.status == "False" and is_new and now.reason != refused:
                self.tell("Normal" if now.reason == INPUT_NOT_READY else "Warning", now.reason, now.message)

    def _sentence(self, before: str) -> str:
        """Of the event that tells a new phase: the message of the condition that it follows from."""
        kinds = TOLD_BY.get(self.status.phase, ("Training",))
        told = [conditions.found(self.status.conditions, kind) for kind in kinds]
        return next((each.message for each in told if each and each.message), f"The job was {before} before.")

    @property
    def has_ended(self) -> bool:
        """Whether the job has succeeded or failed, for good."""
        is_final = any(conditions.holds(self.status.conditions, kind) for kind in ("Complete", "Failed"))
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

    def set(self, **changes: Any) -> None:
        """Write fields of the status."""
        self.status = self.status.model_copy(update=changes)

    def set_record(self, **changes: Any) -> None:
        """Write fields of the current attempt, if there is one."""
        if self.record is not None:
            self.set(attempts=(*self.status.attempts[:-1], self.record.model_copy(update=changes)))

    def begin_record(self, attempt: Attempt) -> None:
        """Add an attempt, or begin the one again that the operator died before making."""
        earlier = tuple(each for each in self.status.attempts if each.attempt != attempt.attempt)
        self.set(attempt=attempt.attempt, attempts=(*earlier, attempt)[-MOST_ATTEMPTS:])

    def say(self, kind: ConditionType, status: Truth, reason: str, message: str = "") -> None:
        """Write a condition."""
        new = conditions.condition(kind, status, reason, message, now=self.now, generation=self.snapshot.job.generation)
        self.set(conditions=conditions.merged(self.status.conditions, new, self.snapshot.job.status.conditions))

    def tell(self, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Add an event."""
        self.events.append(Event(kind=kind, reason=reason, message=conditions.shortened(message)))

    def again(self, seconds: float) -> None:
        """Look again after so long, or earlier."""
        self.waits.append(seconds)

    def need_live(self, why: str) -> None:
        """Go on only with what the server says now."""
        if not self.snapshot.fresh:
            raise NeedsLiveError(why)

    def age(self, moment: datetime | None) -> float:
        """Seconds since a moment."""
        return since(moment, self.now)

    def became(self, kind: ConditionType, status: Truth = "True") -> datetime | None:
        """When a condition took the status that it has; None where it has another."""
        each = conditions.found(self.status.conditions, kind)
        return parsed(each.last_transition_time) if each and each.status == status else None


def _job(snapshot: Snapshot) -> tuple[Job | None, str]:
    seen = snapshot.job
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": seen.name, "namespace": seen.namespace},
        "spec": seen.spec,
    }
    try:
        return Job.parse(document), ""
    except SpecError as error:
        return None, str(error)
    except RecursionError:
        return None, "spec: is nested too deeply"


def _policy(snapshot: Snapshot) -> RunPolicy:
    """runPolicy of a spec that cannot be read as a whole."""
    try:
        return RunPolicy.model_validate(snapshot.job.spec.get("runPolicy", {}), by_alias=True, by_name=False)
    except (ValidationError, RecursionError):
        return RunPolicy()


def _mended(snapshot: Snapshot) -> Snapshot:
    """The snapshot with RayJobs known by their names, and a status that has lost none of the attempts they prove."""
    job = snapshot.job
    rayjobs = tuple(replace(each, attempt=_number(each, job.name)) for each in snapshot.rayjobs)
    newest = max((each for each in rayjobs if each.owned), key=lambda each: each.attempt, default=None)
    listed = max((each.attempt for each in job.status.attempts), default=0)
    number = max(job.status.attempt or 0, listed)
    status = job.status
    if newest is not None and newest.attempt > number:
        status = _adopted(status, newest)
    elif number and number != job.status.attempt:
        status = status.model_copy(update={"attempt": number})
    elif number and not any(each.attempt == number for each in status.attempts) and newest and newest.attempt == number:
        status = _adopted(status, newest)
    ordered = tuple(sorted(status.attempts, key=lambda each: each.attempt))
    status = status.model_copy(update={"attempts": ordered})
    return replace(snapshot, job=replace(job, status=status), rayjobs=rayjobs)


def _number(rayjob: RayJobSeen, job: str) -> int:
    """The attempt of a RayJob by its name; 0 if it is none of the job's names."""
    number = rayjob.name.removeprefix(f"{job}-a")
    is_plain = number.isascii() and number.isdigit() and len(number) <= 9
    return int(number) if is_plain and rayjob.name == names.rayjob(job, int(number)) else 0


def _adopted(status: Status, rayjob: RayJobSeen) -> Status:
    """A status that has lost the attempt which this RayJob is."""
    slots = status.mapping.slots if status.mapping else 1
    record = Attempt(attempt=rayjob.attempt, start_time=timestamp(rayjob.created), slots=slots)
    attempts = (*status.attempts, record)[-MOST_ATTEMPTS:]
    return status.model_copy(update={"attempt": rayjob.attempt, "attempts": attempts})
