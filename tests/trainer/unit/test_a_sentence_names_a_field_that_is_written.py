"""Every role of a job, also one that stands in no manifest, is told by a field that the user has written."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from rlhf_api import kubectl_yaml
from rlhf_api.job import Job
from rlhf_trainer.errors import DataError
from rlhf_trainer.run_folder.folder import model_folders
from rlhf_trainer.workers.base import WorkerSetting
from tests.trainer import jobs

MODEL = {"uri": "hf://x"}


def safe(folder: Path, uri: str = "hf://x") -> Job:
    """A job with every role: its reference is the actor's, and its cost critic stands nowhere."""
    terms = [{"name": "a", "reward": {"uri": uri}}]
    return jobs.job(
        folder,
        "safe",
        {
            "algorithm": {"name": "SafeRLHF"},
            "models": {"actor": MODEL, "critic": MODEL, "reward": {"sum": terms}, "cost": MODEL},
            "data": {"train": {"uri": "hf://x"}},
            "training": {"totalSteps": 1, "promptBatchSize": 2},
        },
    )


def written(document: Any, field: str) -> Any:
    """What a document holds at a path."""
    parts = (int(part) if part.isdigit() else part for part in field.split("."))
    return reduce(lambda value, part: value[part], parts, document["spec"]["models"])


def test_the_weights_of_each_role_have_a_field(tmp_path: Path) -> None:
    job = safe(tmp_path)
    (document,) = kubectl_yaml.read((tmp_path / "safe.yaml").read_text(), "")
    fields = {role: job.spec.models.source_field(role) for role in job.models()}
    assert fields["cost_critic"] == "cost"
    assert fields["reference"] == "actor"
    assert {written(document, field)["uri"] for field in fields.values()} == {"hf://x"}


def test_how_each_role_is_trained_has_a_field(tmp_path: Path) -> None:
    job = safe(tmp_path)
    paths = {
        role: WorkerSetting(job=job, role=role, model=model, folder="", total_steps=1).path
        for role, model in job.models().items()
    }
    assert paths["cost_critic"] == paths["critic"] == "safe: spec.models.critic"
    assert paths["reward"] == "safe: spec.models.reward.sum.0.reward"


def test_a_sums_model_that_is_not_there_is_told_by_its_field(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^safe: spec\.models\.reward\.sum\.0\.reward\.uri: "):
        model_folders(safe(tmp_path, "file:///nowhere"), tmp_path)
