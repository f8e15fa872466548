"""One reconcile pass over one job: its snapshot, and the status, actions and events that it has decided on so far."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, Final, Literal, Self

from rlhf_api.job import Job
from rlhf_api.names import API_VERSION, KIND
from rlhf_api.problems import SpecError
from rlhf_api.spec.custom_algorithm import AlgorithmFacts
from rlhf_api.spec.run_policy import RunPolicy
from rlhf_api.status import Attempt, Condition, ConditionType, Phase, Readiness, Status
from rlhf_operator import conditions, names
from rlhf_operator.actions import ClusterAction, Event, Plan, ReadLive
from rlhf_operator.conditions import Kstatus, Truth
from rlhf_operator.placement.turns import Turns
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedJob, ObservedRayJob, Snapshot
from rlhf_operator.times import parsed, since, timestamp

SHORTEST_REQUEUE: Final = 1.0
"""Smallest number of seconds after which a pass may request the next one."""
MAX_LISTED_ATTEMPTS: Final = 10
"""Most attempts in status.attempts: the newest ones; withdrawn attempts are dropped first."""
FINAL: Final = frozenset({"Succeeded", "Failed"})
CURRENT: Final = frozenset({"Running", "Suspended", "Succeeded"})
"""Phases of a job that is as its manifest wants it."""
READINESS: Final[Mapping[Readiness, Kstatus]] = {"Ready": "Current", "Reconciling": "InProgress", "Stalled": "Failed"}
"""Condition of kstatus -> state in which it is True."""
BEFORE_AN_ATTEMPT: Final[tuple[ConditionType, ...]] = ("Accepted", "InputsReady", "Mapped")
"""Conditions that must be True before a RayJob is created."""
WITH_EVENTS: Final[tuple[ConditionType, ...]] = (*BEFORE_AN_ATTEMPT, "ClusterReady", "SandboxesReady", "Healthy")
"""Conditions whose new reasons are reported by an event."""
FAILURE_LIMITS: Final = ("BackoffLimitExceeded", "FailureRule")
"""Reasons of the condition Failed that say less than the failure of the last attempt."""
INPUT_NOT_READY: Final = "InputNotReady"
NO_WARNINGS: Final = frozenset({INPUT_NOT_READY, conditions.READING_SHAPES, conditions.SLOW_START})
"""Reasons of conditions that may need no action by the user: the job waits for an input job, a pod or an image."""
ON_ITS_WAY: Final = frozenset({"Starting", "Queued", "PodsPending", conditions.KEPT, "Ended"})
"""Reasons of the conditions ClusterReady=False and SandboxesReady=False that need no event of their own."""


class NeedsLiveReadError(Exception):
    """The next step cannot be undone, but the snapshot came from the cache: the objects must be read live."""

    def __init__(self, why: str, *, alone: bool) -> None:
        self.look = ReadLive(why=why, alone=alone)
        super().__init__(why)


@dataclass(kw_only=True)
class ReconcileContext:
    """State of a pass over a job: `status` is the new status so far, `snapshot.job.status` the old one."""

    snapshot: Snapshot
    now: datetime
    settings: Settings
    status: Status
    job: Job | None
    """Parsed job; None if its spec cannot be read: `problem` then says why."""
    problem: str
    policy: RunPolicy
    actions: list[ClusterAction] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    requeue_times: list[float] = field(default_factory=list)
    has_shapes: bool | None = None
    """Whether all shapes of the job's models are known; None: the pass has not asked yet."""

    @classmethod
    def of(cls, snapshot: Snapshot, now: datetime, settings: Settings) -> Self:
        """Return the context at the start of a pass."""
        job, problem = _job(snapshot)
        policy = job.spec.run_policy if job else _policy(snapshot)
        seen = _repaired(snapshot)
        status = seen.job.status
        return cls(snapshot=seen, now=now, settings=settings, status=status, job=job, problem=problem, policy=policy)

    def plan(self) -> Plan:
        """Return the plan of the pass, with the phase by the conditions, and an event if the phase has changed."""
        before = self.snapshot.job.status.phase
        if not self.has_ended or before not in FINAL:
            reached = conditions.phase_of(self.status.conditions)
            self.set_status(phase=reached, reason=self._reason(reached))
        phase, generation = self.status.phase, self.snapshot.job.generation
        self.set_status(observed_generation=generation if generation >= 0 else None)
        self._set_readiness(phase)
        self._add_obstacle_events()
        if phase != before and phase not in ("Pending", "Mapping"):  # the events of conditions say why
            messages = (each.message for each in conditions.explaining(self.status, phase))
            message = next(filter(None, messages), f"The job was {before} before.")
            self.add_event("Warning" if phase == "Failed" else "Normal", phase, message)
        again = min((max(wait, SHORTEST_REQUEUE) for wait in self.requeue_times), default=None)
        return Plan(status=self.status, actions=tuple(self.actions), events=tuple(self.events), requeue_after=again)

    def _set_readiness(self, phase: Phase) -> None:
        """Set the conditions of kstatus. As with a Kubernetes Job, a job that trains or is suspended is Current."""
        state: Kstatus = "Failed" if phase == "Failed" else "Current" if phase in CURRENT else "InProgress"
        message = next((each.message for each in conditions.explaining(self.status, phase) if each.message), "")
        for kind, true_in in READINESS.items():
            is_true = state == true_in
            self.set_condition(kind, "True" if is_true else "False", state, message if is_true else "")

    def _add_obstacle_events(self) -> None:
        """Add an event for each new reason why no attempt can start, or why its pods do not start."""
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
        failure, failed = self.status.last_failure, self.condition("Failed")
        follows = phase == "Restarting" or (failed is not None and failed.reason in FAILURE_LIMITS)
        if follows and failure is not None and failure.attempt == self.status.attempt:
            return failure.reason
        if phase == "Running" and self.holds("Slow"):
            return "NoProgress"
        is_reached = phase in FINAL or phase == "Suspended"
        candidates = conditions.explaining(self.status, phase)
        return next((each.reason for each in candidates if each.status != "True" or is_reached), None)

    @cached_property
    def turns(self) -> Turns:
        """Turns of the jobs in line; what this job holds itself does not count."""
        seen = self.snapshot
        return Turns(seen.nodes or (), seen.priorities, seen.holders, self.settings)

    @property
    def has_ended(self) -> bool:
        """Whether the job has succeeded or failed, for good."""
        return self.holds("Complete") or self.holds("Failed") or self.status.phase in FINAL

    @property
    def record(self) -> Attempt | None:
        """Record of the current attempt in the status; None without an attempt."""
        last = self.status.attempts[-1] if self.status.attempts else None
        return last if last is not None and last.attempt == self.status.attempt else None

    @property
    def outcome(self) -> str | None:
        """Outcome of the current attempt; None without an attempt."""
        return self.record.outcome if self.record else None

    @property
    def is_open(self) -> bool:
        """Whether the status names an attempt that has not ended, even if its RayJob is not there yet."""
        return self.outcome in ("Starting", "Running")

    @property
    def coming_nodes(self) -> tuple[str, ...]:
        """Names of coming nodes with room for the job's pods, except extra elastic ones, until the pods have nodes."""
        return tuple(each.node for each in self.status.reserved if names.group_of(each.node) and not each.extra)

    @property
    def is_under_way(self) -> bool:
        """Whether an attempt has begun and not ended; one whose RayJob was never seen has not begun."""
        was_seen = self.snapshot.current_rayjob() is not None or self.status.ray_job_name is not None
        return was_seen and self.is_open

    def set_status(self, **changes: Any) -> None:
        """Change fields of the new status."""
        self.status = self.status.model_copy(update=changes)

    def set_record(self, **changes: Any) -> None:
        """Change fields of the current attempt's record, if there is an attempt."""
        if self.record is not None:
            self.set_status(attempts=(*self.status.attempts[:-1], self.record.model_copy(update=changes)))

    def begin_record(self, attempt: Attempt) -> None:
        """Add the record of a new attempt, or replace it if the operator died before it created the RayJob."""
        attempts = [*(each for each in self.status.attempts if each.attempt != attempt.attempt), attempt]
        while len(attempts) > MAX_LISTED_ATTEMPTS:
            attempts.remove(next((each for each in attempts if each.outcome == "Withdrawn"), attempts[0]))
        self.set_status(attempt=attempt.attempt, attempts=tuple(attempts))

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of this type in the new status; None if there is none."""
        return conditions.found(self.status.conditions, kind)

    def holds(self, kind: ConditionType) -> bool:
        """Whether the condition of this type is True in the new status."""
        return conditions.holds(self.status.conditions, kind)

    def set_condition(self, kind: ConditionType, status: Truth, reason: str, message: str = "") -> None:
        new = Condition(
            type=kind,
            status=status,
            reason=reason,
            message=conditions.shortened(message),
            last_transition_time=timestamp(self.now),
            observed_generation=max(self.snapshot.job.generation, 0),
        )
        self.set_status(conditions=conditions.merged(self.status.conditions, new, self.snapshot.job.status.conditions))

    def add_event(self, kind: Literal["Normal", "Warning"], reason: str, message: str, *, node: str = "") -> None:
        """Add a Kubernetes event about the job, or about a node."""
        self.events.append(Event(kind=kind, reason=reason, message=conditions.shortened(message), node=node))

    def requeue_after(self, seconds: float) -> None:
        """Request another pass after `seconds` at the latest."""
        self.requeue_times.append(seconds)

    def must_wait(self, seconds: float) -> bool:
        """Whether there are seconds left to wait; if so, another pass is requested at their end."""
        if seconds > 0:
            self.requeue_after(seconds)
        return seconds > 0

    def require_live(self, why: str, *, alone: bool = False) -> None:
        """Raise NeedsLiveReadError unless this pass has read job and RayJobs from the API server.

        why: for the log. alone: require also that no other job reserves room during the pass.
        """
        if not self.snapshot.fresh or (alone and not self.snapshot.alone):
            raise NeedsLiveReadError(why, alone=alone)

    def age(self, moment: datetime | None) -> float:
        """Return the seconds since a moment; 0 without a moment, or if it lies ahead."""
        return since(moment, self.now)

    def condition_since(self, kind: ConditionType, status: Truth = "True") -> datetime | None:
        """Return the time at which a condition took on this status; None if its status differs now."""
        each = self.condition(kind)
        return parsed(each.last_transition_time) if each and each.status == status else None


def parse_job(job: ObservedJob) -> Job:
    """Return a job of the cluster, parsed, with the defaults of unset fields. Raises SpecError for an invalid spec."""
    return _parsed_job(job.name, job.namespace, json.dumps(job.spec), job.status.step)


def _job(snapshot: Snapshot) -> tuple[Job | None, str]:
    try:
        return parse_job(snapshot.job), ""
    except SpecError as error:
        return None, str(error)
    except RecursionError:
        return None, "spec: is nested too deeply"


@lru_cache(maxsize=256)
def _parsed_job(name: str, namespace: str, spec: str, step: AlgorithmFacts | None) -> Job:
    """Parse a job with a spec in JSON; cached, because the passes over a job follow one another closely."""
    metadata = {"name": name, "namespace": namespace}
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": json.loads(spec)}
    return Job.parse(document, step=step)


def _policy(snapshot: Snapshot) -> RunPolicy:
    """Return runPolicy of a spec that is invalid as a whole; the default one if runPolicy is invalid too."""
    try:
        return RunPolicy.model_validate(snapshot.job.spec.get("runPolicy", {}), by_alias=True, by_name=False)
    except (ValueError, RecursionError):
        return RunPolicy()


def _repaired(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with attempt numbers from the RayJobs' names; the status gets an attempt that it lacks."""
    job = snapshot.job
    rayjobs = tuple(replace(each, attempt=_number(each, job.name)) for each in snapshot.rayjobs)
    newest = max((each for each in rayjobs if each.owned), key=lambda each: each.attempt, default=None)
    attempts, listed = job.status.attempts, {each.attempt for each in job.status.attempts}
    number = max(job.status.attempt or 0, *listed, 0)
    if newest is not None and newest.attempt >= max(number, 1) and newest.attempt not in listed:
        number, slots = newest.attempt, job.status.mapping.slots if job.status.mapping else 1
        record = Attempt(attempt=number, start_time=timestamp(newest.created), slots=slots)
        attempts = (*attempts, record)[-MAX_LISTED_ATTEMPTS:]
    ordered = tuple(sorted(attempts, key=lambda each: each.attempt))
    status = job.status.model_copy(update={"attempt": number or job.status.attempt, "attempts": ordered})
    return replace(snapshot, job=replace(job, status=status), rayjobs=rayjobs)


def _number(rayjob: ObservedRayJob, job: str) -> int:
    """Return the attempt number in the name of a job's RayJob; 0 for any other name."""
    number = rayjob.name.removeprefix(f"{job}-a")
    is_plain = number.isascii() and number.isdigit() and len(number) <= 9
    return int(number) if is_plain and rayjob.name == names.rayjob_name(job, int(number)) else 0
