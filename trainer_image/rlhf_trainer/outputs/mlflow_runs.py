"""Runs in MLflow. Its client reads MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

import os
import re
import string
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_api.checks.resume import leaves
from rlhf_api.files import document_of
from rlhf_api.job import Job
from rlhf_api.problems import one_line
from rlhf_api.spec.outputs import MLflow
from rlhf_api.status import Phase
from rlhf_trainer.errors import EnvironmentProblem

TOKEN = "MLFLOW_TRACKING_TOKEN"
VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # `Tracker` retries by itself
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Environment variables for MLflow's client; a value that the user has set takes precedence."""
PARAMETERS_AT_ONCE = 100
"""Most parameters in one request to MLflow."""
MAX_NAME, MAX_VALUE = 250, 6000
"""Most characters of the name and of the value of an MLflow parameter; longer ones are cut."""
NOT_IN_A_NAME = re.compile(r"[^-A-Za-z0-9_. :/]")
STATUS: Mapping[Phase, str] = {"Succeeded": "FINISHED", "Failed": "FAILED", "Stopped": "KILLED"}


class MLflowRuns:
    """Tracking service that records each job as a run in an experiment of an MLflow server."""

    def __init__(self, field: str, settings: MLflow) -> None:
        self.field, self._settings = field, settings
        self.target: Mapping[str, Any] = settings.model_dump(mode="json")
        self._run = ""

    @property
    def _client(self) -> Any:
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self._settings.uri)

    def check(self) -> None:
        client = self._client
        if set(os.environ.get(TOKEN, "")) & set(string.whitespace):  # the client's error would show the token
            raise EnvironmentProblem(f"{self.field}: {TOKEN} holds a space or a newline")
        try:
            client.search_experiments(max_results=1)
        except Exception as error:  # any error: no MLflow server answers
            reason = one_line(f"{type(error).__name__}: {error}", 200)
            raise EnvironmentProblem(f"{self.field}.uri: {self._settings.uri} does not answer: {reason}") from error

    def create(self, job: Job) -> str:
        client = self._client
        found = client.get_experiment_by_name(self._settings.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self._settings.experiment)
        return str(client.create_run(experiment, run_name=job.name).info.run_id)

    def go_on(self, job: Job, run: str) -> None:
        """Open MLflow's run of this id, and add parameters that are missing: MLflow refuses to change a parameter."""
        from mlflow.entities import Param

        client = self._client
        known = client.get_run(run).data.params
        new = [Param(name, value) for name, value in parameters(job).items() if name not in known]
        for first in range(0, len(new), PARAMETERS_AT_ONCE):
            client.log_batch(run, params=new[first : first + PARAMETERS_AT_ONCE])
        client.update_run(run, status="RUNNING")
        self._run = run

    def send(self, records: Sequence[Mapping[str, float]]) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        for record in records:  # a step has fewer than the 1000 metrics that a request may have
            named = ((NOT_IN_A_NAME.sub("_", name), value) for name, value in record.items() if name != "step")
            metrics = [Metric(name, value, now, int(record["step"])) for name, value in named]
            self._client.log_batch(self._run, metrics=metrics)

    def close(self, phase: Phase) -> None:
        self._client.set_terminated(self._run, status=STATUS[phase])


def parameters(job: Job) -> dict[str, str]:
    """Return a job's resolved manifest as MLflow's parameters, field path -> value, without `spec.runtime`."""
    document = document_of(job)
    return {
        NOT_IN_A_NAME.sub("_", path)[:MAX_NAME]: str(value)[:MAX_VALUE]
        for path, value in leaves(document)
        if value is not None and not path.startswith("spec.runtime")
    }
