"""Port on which Prometheus reads the metrics of the job that runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, disable_created_metrics, start_http_server

from rlhf_api.job import Job
from rlhf_api.status import Phase
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run_folder.step_metrics import METRICS, PLANNED_STEPS, WARNINGS, Kind, metric_of
from rlhf_trainer.telemetry import StepReport

TYPES: Mapping[Kind, type[Gauge | Counter | Summary]] = {"gauge": Gauge, "counter": Counter, "summary": Summary}


class PrometheusMetrics:
    """Listener of a run's steps that updates the Prometheus metric of each entry of METRICS."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # no second series that says when each began
        self._families = {
            metric.name: TYPES[metric.kind](metric.name, metric.meaning, metric.labels, registry=registry)
            for metric in METRICS
        }
        self._job = ("", "")

    def begin(self, job: Job, *, first_step: int, total_steps: int) -> None:  # noqa: ARG002 `step` says it
        self._job = (job.name, job.spec.algorithm.name)
        self._put(PLANNED_STEPS, total_steps)
        self._put(WARNINGS, 0)

    def step(self, report: StepReport) -> None:
        self._put(WARNINGS, len(report.warnings))
        for name, value in report.record.items():
            self._put(name, value)

    def end(self, phase: Phase) -> None:
        """Do nothing at the end of a job: Prometheus reads its last values until the run ends."""

    def _put(self, name: str, value: float) -> None:
        """Update the Prometheus metric of a name in metrics.jsonl by a value; a name that METRICS lacks is left out."""
        if not (metric := metric_of(name)):
            return
        part = [name.partition("/")[2]] if metric.part else []
        child = self._families[metric.name].labels(*self._job, *part)
        if isinstance(child, Gauge):
            child.set(value)
        elif isinstance(child, Counter):
            child.inc(value)
        else:
            child.observe(value)


@contextmanager
def serve_metrics(port: int) -> Iterator[PrometheusMetrics]:
    """Serve metrics on a port of all network interfaces during the block. EnvironmentProblem if it cannot be opened."""
    registry = CollectorRegistry()
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as error:
        raise EnvironmentProblem(f"--metrics-port {port}: cannot be opened: {error.strerror}") from error
    try:
        yield PrometheusMetrics(registry)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
