"""Destinations of a job's measurements besides its run folder."""

from typing import Literal

from pydantic import Field

from rlhf_api.contract import PROJECT, Listed, Spec, Text
from rlhf_api.spec.functions import EntryPoint, ServiceUrl


class WandB(Spec):
    """A run in Weights & Biases, named as the job."""

    project: str = Field(pattern=PROJECT, max_length=128)
    r"""Project of the run, whose name is without / \ # ? % and :."""
    entity: Text | None = Field(None, description="User or team of the project; unset: the default of the API key.")
    mode: Literal["Online", "Offline"] = "Online"
    """Online needs WANDB_API_KEY in the environment; Offline leaves files for wandb sync."""


class MLflow(Spec):
    """A run in MLflow, named as the job."""

    uri: ServiceUrl = Field(description="URL of the tracking server: http:// or https://.")
    experiment: Text = Field(description="Experiment that the run belongs to; created if it does not exist.")


class OpenTelemetry(Spec):
    """A collector of traces, by OTLP over HTTP; OTEL_EXPORTER_OTLP_HEADERS may hold its credentials."""

    endpoint: ServiceUrl
    """URL of the collector, to which /v1/traces is added, such as http://collector:4318."""


class Outputs(Spec):
    """Receivers of the lines of metrics.jsonl, and of traces; secrets come from the environment only."""

    tensorboard: bool = Field(False, description="Write event files to tensorboard/<job> in the run folder.")
    wandb: WandB | None = Field(None, description="Run in Weights & Biases that gets the metrics.")
    mlflow: MLflow | None = Field(None, description="Run in MLflow that gets the metrics.")
    otel: OpenTelemetry | None = Field(None, description="Collector that gets the spans of each step as a trace.")
    callbacks: Listed[EntryPoint] = Field((), max_length=16)
    """Classes of your own, with step(record) and close(summary)."""
