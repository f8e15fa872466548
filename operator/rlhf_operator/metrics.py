"""Prometheus metrics of the operator; metrics.yaml has their table, and docs/operator-metrics.md shows it.

Only the leader has series of jobs, made from the cache at each scrape; so a sum over the replicas counts a job once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Final, Literal, NamedTuple, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rlhf_api.spec.job_spec import Checkpoint
from rlhf_api.status import Phase, Progress
from rlhf_api.tables import read_table
from rlhf_operator.snapshot import ObservedJob
from rlhf_operator.times import parsed, since

Result = Literal["done", "stale", "error"]
"""Result of a reconcile pass. stale: given up as the job had changed or the lead was lost; error: tried again later."""
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ENDED: Final = ("Succeeded", "Failed")
WITH_PODS: Final = ("Provisioning", "Initializing", "Running", "Suspending")
Instrument = TypeVar("Instrument")


class Metric(NamedTuple):
    """Row of metrics.yaml."""

    name: str
    unit: str
    meaning: str
    kind: Literal["gauge", "counter", "histogram"] = "gauge"
    labels: tuple[str, ...] = ()

    def instrument(self, make: Callable[..., Instrument], registry: CollectorRegistry) -> Instrument:
        """Create the Prometheus instrument of this metric in a registry."""
        return make(self.name, self.meaning, self.labels, registry=registry)


_TABLES = read_table(__package__, "metrics.yaml", dict[str, tuple[Metric, ...]])
OPERATOR_METRICS = _TABLES["operator"]
JOB_METRICS = tuple(each._replace(labels=("namespace", "name", *each.labels)) for each in _TABLES["jobs"])
"""Metrics about jobs; a job's totals of time and cost begin at 0 when this replica begins to lead."""


@dataclass
class Account:
    """Time, GPU time and cost of one RLHFJob, added up from scrape to scrape of the operator's metrics."""

    job: ObservedJob
    """RLHFJob whose time is counted, as it was at `seen`."""
    seen: datetime
    """Time of the last scrape."""
    seconds: defaultdict[Phase, float] = field(default_factory=lambda: defaultdict(float))
    gpu_seconds: defaultdict[Phase, float] = field(default_factory=lambda: defaultdict(float))
    """GPUs of the mapping times seconds, by phase; phases in which the job waits for pods count too."""
    cost: float | None = None
    """Price of the GPU time in phases with pods; None if the job's GPUs have no price."""
    failed_passes: int = 0

    def add(self, seconds: float) -> None:
        """Add seconds during which the job was in its last observed state."""
        phase, mapping = self.job.status.phase, self.job.status.mapping
        self.seconds[phase] += seconds
        if mapping is None:
            return
        self.gpu_seconds[phase] += mapping.gpus * seconds
        if mapping.price_per_hour is not None:
            spent = mapping.price_per_hour * seconds / 3600.0 if phase in WITH_PODS else 0.0
            self.cost = (self.cost or 0.0) + spent


def look(known: Mapping[str, Account], jobs: Iterable[ObservedJob], now: datetime) -> dict[str, Account]:
    """Return the account of each job by uid; known: the accounts of the last scrape.

    The time since the last scrape counts for the phase and the GPUs that each job had then.
    """
    accounts = {}
    for job in jobs:
        account = known.get(job.uid) or Account(job, now)
        if account.job.status.phase not in ENDED:
            account.add(max(0.0, (now - account.seen).total_seconds()))
        account.job, account.seen = job, now
        accounts[job.uid] = account
    return accounts


Sample = tuple[tuple[str, ...], float]
"""Sample of a job's metric: (values of the labels besides namespace and name, value)."""


def _value(value: float | None) -> Iterator[Sample]:
    if value is not None:
        yield (), float(value)


def _info(account: Account) -> Iterator[Sample]:
    algorithm = account.job.spec.get("algorithm")
    name = str(algorithm.get("name", "")) if isinstance(algorithm, Mapping) else ""
    yield (account.job.uid, name, account.job.status.queue or ""), 1.0


def _phases(account: Account) -> Iterator[Sample]:
    # Stopped is no phase of a cluster.
    return (((phase,), float(phase == account.job.status.phase)) for phase in get_args(Phase) if phase != "Stopped")


def _last_failure(account: Account) -> Iterator[Sample]:
    if account.job.status.last_failure:
        yield (account.job.status.last_failure.reason,), 1.0


def _progress(value: Callable[[Progress], float | None]) -> Callable[[Account], Iterator[Sample]]:
    return lambda account: _value(value(progress) if (progress := account.job.status.progress) else None)


def _predicted(account: Account) -> Iterator[Sample]:
    mapping = account.job.status.mapping
    return _value(mapping.predicted_step_seconds if mapping else None)


def _gpus(account: Account) -> Iterator[Sample]:
    mapping = account.job.status.mapping
    if mapping and account.job.status.phase in WITH_PODS:
        yield (), float(mapping.gpus)


def _queued(account: Account) -> Iterator[Sample]:
    status = account.job.status
    moments = [each.last_transition_time for each in status.conditions if each.type == "QuotaReserved"]
    moments += [each.start_time for each in status.attempts[-1:]]  # between two attempts there was no quota either
    ages = [age for each in moments if (age := _age(each, account.seen)) is not None]
    return _value(min(ages, default=None) if status.phase == "Queued" else None)


def _checkpoint_age(account: Account) -> Iterator[Sample]:
    saved, phase = account.job.status.checkpoint, account.job.status.phase
    return _value(_age(saved.time, account.seen) if saved and phase not in ENDED else None)


def _checkpoint_interval(account: Account) -> Iterator[Sample]:
    checkpoint = account.job.spec.get("checkpoint")
    minutes = checkpoint.get("everyMinutes") if isinstance(checkpoint, Mapping) else None
    return _value(60.0 * (minutes if isinstance(minutes, int | float) else Checkpoint().every_minutes))


def _conditions(account: Account) -> Iterator[Sample]:
    # Users may write one twice.
    found = {(each.type, each.status, each.reason) for each in account.job.status.conditions}
    return ((each, 1.0) for each in sorted(found))


def _age(timestamp: str | None, now: datetime) -> float | None:
    """Seconds since a timestamp; None if it cannot be read: users may write a status too."""
    return since(moment, now) if (moment := parsed(timestamp)) else None


SAMPLES: Mapping[str, Callable[[Account], Iterable[Sample]]] = {
    "rlhf_job_info": _info,
    "rlhf_job_phase": _phases,
    "rlhf_job_attempts_total": lambda account: _value(account.job.status.attempt or 0),
    "rlhf_job_failed_attempts": lambda account: _value(account.job.status.failed_attempts or 0),
    "rlhf_job_last_failure": _last_failure,
    "rlhf_job_step": _progress(lambda progress: progress.step),
    "rlhf_job_total_steps": _progress(lambda progress: progress.total_steps),
    "rlhf_job_step_seconds": _progress(lambda progress: progress.step_seconds),
    "rlhf_job_predicted_step_seconds": _predicted,
    "rlhf_job_gpus": _gpus,
    "rlhf_job_queue_seconds": _queued,
    "rlhf_job_checkpoint_age_seconds": _checkpoint_age,
    "rlhf_job_checkpoint_interval_seconds": _checkpoint_interval,
    "rlhf_job_failed_passes": lambda account: _value(account.failed_passes),
    "rlhf_job_condition": _conditions,
    "rlhf_job_phase_seconds_total": lambda account: (((phase,), n) for phase, n in account.seconds.items()),
    "rlhf_job_gpu_seconds_total": lambda account: (((phase,), n) for phase, n in account.gpu_seconds.items()),
    "rlhf_job_cost_total": lambda account: _value(account.cost),
}
"""Function that yields the samples of a job's metric, by the metric's name; none if a job has no such value."""


class JobCollector(Collector):
    """Collector of the metrics of all jobs that exist at a scrape."""

    def __init__(
        self,
        jobs: Callable[[], Iterable[ObservedJob]],
        failed_passes: Callable[[], Mapping[tuple[str, str], int]],
        now: Callable[[], datetime],
    ) -> None:
        self._jobs, self._failed_passes, self._now = jobs, failed_passes, now
        self._accounts: dict[str, Account] = {}

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        self._accounts = look(self._accounts, self._jobs(), self._now())
        failed = self._failed_passes()
        for account in self._accounts.values():
            account.failed_passes = failed.get((account.job.namespace, account.job.name), 0)
        for metric in JOB_METRICS:
            made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = made(metric.name, metric.meaning, labels=metric.labels)
            for account in self._accounts.values():
                for own, value in SAMPLES[metric.name](account):
                    family.add_metric([account.job.namespace, account.job.name, *own], value)
            yield family


class OperatorMetrics:
    """Registry of the operator's metrics, with the methods by which the operator's other modules report values."""

    def __init__(
        self,
        *,
        version: str,
        jobs: Callable[[], Iterable[ObservedJob]],
        queue_depth: Callable[[], int],
        failed_passes: Callable[[], Mapping[tuple[str, str], int]],
        leads: Callable[[], bool],
        now: Callable[[], datetime],
    ) -> None:
        """Create the metrics, whose functions are called at each scrape; failed_passes: by (namespace, name)."""
        rows = {each.name: each for each in OPERATOR_METRICS}
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._passes = rows["rlhf_operator_reconcile_total"].instrument(Counter, self.registry)
        self._seconds = rows["rlhf_operator_reconcile_duration_seconds"].instrument(
            partial(Histogram, buckets=BUCKETS), self.registry
        )
        self._requests = rows["rlhf_operator_api_requests_total"].instrument(Counter, self.registry)
        rows["rlhf_operator_queue_depth"].instrument(Gauge, self.registry).set_function(lambda: float(queue_depth()))
        rows["rlhf_operator_leader"].instrument(Gauge, self.registry).set_function(lambda: float(leads()))
        rows["rlhf_operator_build_info"].instrument(Gauge, self.registry).labels(version).set(1)
        self.registry.register(JobCollector(lambda: jobs() if leads() else (), failed_passes, now))

    def reconciled(self, result: Result, seconds: float) -> None:
        """Count a finished reconcile pass over a job, with the duration of the pass in seconds."""
        self._passes.labels(result).inc()
        self._seconds.observe(seconds)

    def requested(self, verb: str, resource: str, code: int) -> None:
        """Count a finished request. resource: such as rlhfjobs/status; code: HTTP code, 0 without an answer."""
        self._requests.labels(verb, resource, str(code)).inc()
