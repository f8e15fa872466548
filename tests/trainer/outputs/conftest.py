"""A job, and steps of it as the loop reports them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_api.job import Job
from rlhf_trainer.outputs.display import Display
from rlhf_trainer.outputs.opening import ListenersOf
from rlhf_trainer.run.publisher import Publisher
from rlhf_trainer.run_folder.folder import JobFolder
from rlhf_trainer.telemetry import CONTROLLER, TRANSFER, Span, StepReport
from tests.trainer.jobs import job

MODEL = "package://rlhf_examples/helpful/model"
DATA = {"train": {"uri": "package://rlhf_examples/helpful/train.jsonl"}, "maxPromptTokens": 16, "maxResponseTokens": 48}


@pytest.fixture
def sft(tmp_path: Path) -> Job:
    """An SFT job."""
    spec = {
        "algorithm": {"name": "SFT"},
        "models": {"actor": {"uri": MODEL, "optimizer": {"learningRate": 1e-3}}},
        "data": DATA,
        "training": {"totalSteps": 4, "batchSize": 8},
    }
    return job(tmp_path, "tiny-sft", spec)


@pytest.fixture
def publisher_with(sft: Job, tmp_path: Path) -> Callable[..., Publisher]:
    """Makes the publisher of the SFT job, with its folder under tmp_path/run, for a display and other listeners."""

    def made(display: Display, outputs: ListenersOf = lambda _: []) -> Publisher:
        folder = JobFolder(tmp_path / "run", sft)
        folder.begin(None, inputs={})
        return Publisher(sft, folder, display, outputs)

    return made


def step_report(number: int, *warnings: str, **record: float) -> StepReport:
    """Step `number` of two pools of one rank, a second long; double underscores in names stand for slashes."""
    began = 1000.0 + number
    spans = [
        Span(CONTROLLER, f"step {number}", 0, began, began + 1.0),
        Span(TRANSFER, "actor.update: fetch", 0, began + 0.1, began + 0.2, "left"),
        Span("update", "actor.update", 0, began + 0.2, began + 0.9, "left"),
        Span("scoring", "reward.score", 0, began + 0.1, began + 0.6, "right"),
    ]
    values = {name.replace("__", "/"): value for name, value in record.items()}
    return StepReport(record={"step": number, **values}, warnings=warnings, spans=spans)
