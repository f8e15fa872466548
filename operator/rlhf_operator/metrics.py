"""Prometheus metrics of the operator; metrics.yaml has their table, and docs/operator-metrics.md shows it.

Only the leader has series of jobs, made from the cache at each scrape; so a sum over the replicas counts a job once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rlhf_api.spec.job_spec import Checkpoint
from rlhf_api.status import Phase
from rlhf_api.tables import read_table
from rlhf_operator.snapshot import ObservedJob
from rlhf_operator.times import parsed, since

Result = Literal["done", "stale", "error"]
"""Result of a reconcile pass. stale: given up as the job had changed or the lead was lost; error: tried again later."""
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ENDED: Final = ("Succeeded", "Failed")
WITH_PODS: Final = ("Provisioning", "Initializing", "Running", "Suspending")
MAKERS: Final[Mapping[str, Callable[..., Any]]] = {
    "gauge": Gauge,
    "counter": Counter,
    "histogram": partial(Histogram, buckets=BUCKETS),
}


class Metric(NamedTuple):
    """Row of metrics.yaml."""

    name: str
    unit: str
    meaning: str
    kind: Literal["gauge", "counter", "histogram"] = "gauge"
    labels: tuple[str, ...] = ()


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


Samples = Mapping[tuple[str, ...], float]
"""Values of a job's metric by the values of its labels besides namespace and name; empty if the job has no value."""


def samples_of(account: Account) -> dict[str, Samples]:
    """Return the samples of all metrics of a job by the metric's name."""
    job, status, phase = account.job, account.job.status, account.job.status.phase
    progress, mapping, saved, failure = status.progress, status.mapping, status.checkpoint, status.last_failure
    values = {
        "rlhf_job_attempts_total": status.attempt or 0,
        "rlhf_job_failed_attempts": status.failed_attempts or 0,
        "rlhf_job_step": progress.step if progress else None,
        "rlhf_job_total_steps": progress.total_steps if progress else None,
        "rlhf_job_step_seconds": progress.step_seconds if progress else None,
        "rlhf_job_predicted_step_seconds": mapping.predicted_step_seconds if mapping else None,
        "rlhf_job_gpus": mapping.gpus if mapping and phase in WITH_PODS else None,
        "rlhf_job_queue_seconds": _queue_seconds(account) if phase == "Queued" else None,
        "rlhf_job_checkpoint_age_seconds": _age(saved.time, account.seen) if saved and phase not in ENDED else None,
        "rlhf_job_checkpoint_interval_seconds": _checkpoint_interval(job),
        "rlhf_job_failed_passes": account.failed_passes,
        "rlhf_job_cost_total": account.cost,
    }
    labelled: dict[str, Samples] = {
        "rlhf_job_info": {(job.uid, job.algorithm, status.queue or ""): 1.0},
        # A job on a cluster is never Stopped.
        "rlhf_job_phase": {(each,): float(each == phase) for each in get_args(Phase) if each != "Stopped"},
        "rlhf_job_last_failure": {(failure.reason,): 1.0} if failure else {},
        "rlhf_job_condition": {(each.type, each.status, each.reason): 1.0 for each in status.conditions},
        "rlhf_job_phase_seconds_total": {(each,): seconds for each, seconds in account.seconds.items()},
        "rlhf_job_gpu_seconds_total": {(each,): seconds for each, seconds in account.gpu_seconds.items()},
    }
    return labelled | {name: {} if value is None else {(): float(value)} for name, value in values.items()}


def _queue_seconds(account: Account) -> float | None:
    status = account.job.status
    moments = [each.last_transition_time for each in status.conditions if each.type == "QuotaReserved"]
    moments += [each.start_time for each in status.attempts[-1:]]  # QuotaReserved is False between attempts, too
    return min((age for each in moments if (age := _age(each, account.seen)) is not None), default=None)


def _checkpoint_interval(job: ObservedJob) -> float:
    checkpoint = job.spec.get("checkpoint")
    minutes = checkpoint.get("everyMinutes") if isinstance(checkpoint, Mapping) else None
    return 60.0 * (minutes if isinstance(minutes, int | float) else Checkpoint().every_minutes)


def _age(timestamp: str | None, now: datetime) -> float | None:
    """Return the seconds since a timestamp; None if it cannot be read, because users may write a status, too."""
    return since(moment, now) if (moment := parsed(timestamp)) else None


@dataclass(eq=False)
class JobCollector(Collector):
    """Collector of the metrics of all jobs that exist at a scrape."""

    jobs: Callable[[], Iterable[ObservedJob]]
    failed_passes: Callable[[], Mapping[tuple[str, str], int]]
    now: Callable[[], datetime]
    accounts: dict[str, Account] = field(default_factory=dict)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        self.accounts = look(self.accounts, self.jobs(), self.now())
        failed = self.failed_passes()
        for account in self.accounts.values():
            account.failed_passes = failed.get((account.job.namespace, account.job.name), 0)
        samples = [(account.job, samples_of(account)) for account in self.accounts.values()]
        for metric in JOB_METRICS:
            made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = made(metric.name, metric.meaning, labels=metric.labels)
            for job, of_job in samples:
                for own, value in of_job[metric.name].items():
                    family.add_metric([job.namespace, job.name, *own], value)
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
        """Create the metrics. The functions are called at each scrape; failed_passes: numbers by (namespace, name)."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._made = {
            each.name: MAKERS[each.kind](each.name, each.meaning, each.labels, registry=self.registry)
            for each in OPERATOR_METRICS
        }
        self._made["rlhf_operator_queue_depth"].set_function(lambda: float(queue_depth()))
        self._made["rlhf_operator_leader"].set_function(lambda: float(leads()))
        self._made["rlhf_operator_build_info"].labels(version).set(1)
        self.registry.register(JobCollector(lambda: jobs() if leads() else (), failed_passes, now))

    def reconciled(self, result: Result, seconds: float) -> None:
        """Count a finished reconcile pass over a job, with the duration of the pass in seconds."""
        self._made["rlhf_operator_reconcile_total"].labels(result).inc()
        self._made["rlhf_operator_reconcile_duration_seconds"].observe(seconds)

    def requested(self, verb: str, resource: str, code: int) -> None:
        """Count a finished request. resource: such as rlhfjobs/status; code: HTTP code, 0 without an answer."""
        self._made["rlhf_operator_api_requests_total"].labels(verb, resource, str(code)).inc()
