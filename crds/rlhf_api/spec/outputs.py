"""Destinations of a job's measurements besides its run folder."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.contract import PROJECT, Spec, Text
from rlhf_api.spec.functions import EntryPoint, ServiceUrl


class WandB(Spec):
    """A run in Weights & Biases, named as the job."""

    project: Annotated[
        str,
        Field(
            pattern=PROJECT, max_length=128, description="Project of the run, whose name is without / \\ # ? % and :."
        ),
    ]
    entity: Annotated[Text | None, Field(description="User or team of the project; unset: that of the key.")] = None
    mode: Annotated[
        Literal["Online", "Offline"],
        Field(description="Online needs WANDB_API_KEY in the environment; Offline leaves files for wandb sync."),
    ] = "Online"


class MLflow(Spec):
    """A run in MLflow, named as the job."""

    uri: Annotated[ServiceUrl, Field(description="http:// or https:// of the tracking server.")]
    experiment: Annotated[Text, Field(description="Experiment that the run belongs to; made if there is none.")]


class Outputs(Spec):
    """Receivers of the lines of metrics.jsonl; secrets come from the environment only."""

    tensorboard: Annotated[bool, Field(description="Write event files to DIR/tensorboard/<job>.")] = False
    wandb: Annotated[WandB | None, Field(description="Tell Weights & Biases.")] = None
    mlflow: Annotated[MLflow | None, Field(description="Tell MLflow.")] = None
    callbacks: Annotated[
        tuple[EntryPoint, ...],
        Field(strict=False, max_length=16, description="Classes of your own, with step(record) and close(summary)."),
    ] = ()
