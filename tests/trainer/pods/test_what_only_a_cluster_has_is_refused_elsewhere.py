"""A manifest for a cluster, given to `rlhf run` on a laptop."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rlhf_trainer.commands.cli import app
from tests.trainer.jobs import job
from tests.trainer.pods.manifests import SFT


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    claimed: dict[str, Any] = {
        **SFT,
        "models": {"actor": {"uri": "pvc://models/small", "optimizer": {"learningRate": 1e-3}}},
        "data": {"train": {"uri": "pvc://data/train.jsonl"}},
        "checkpoint": {"storage": "pvc://runs"},
        "suspend": True,
        "resources": {"maxNodes": 2, "slotsPerNode": 1},
        "runPolicy": {"backoffLimit": 1},
        "runtime": {"image": "mine:1"},
    }
    job(tmp_path, "mine", claimed)
    return tmp_path / "mine.yaml"


@pytest.mark.usefixtures("handlers")
def test_claims_and_a_suspended_job_are_named_and_not_run(manifest: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["validate", str(manifest)]).exit_code == 0
    done = CliRunner().invoke(app, ["run", str(manifest), f"--output={tmp_path / 'run'}"])
    assert done.exit_code == 2
    sentence = "is on a volume of a cluster, and no operator runs this job"
    assert done.stderr.splitlines() == [
        f"error: mine: spec.models.actor.uri: pvc://models/small {sentence}",
        f"error: mine: spec.data.train.uri: pvc://data/train.jsonl {sentence}",
        f"error: mine: spec.checkpoint.storage: pvc://runs {sentence}",
        "error: mine: spec.suspend: is true, so the job is not run",
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("handlers")
def test_what_is_for_the_operator_alone_is_read_by_nobody(manifest: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(manifest.read_text())
    document["spec"] |= {"suspend": False, "checkpoint": {}, "models": SFT["models"], "data": SFT["data"]}
    document["spec"]["models"]["actor"]["uri"] = f"file://{tmp_path}/no-model"
    manifest.write_text(yaml.safe_dump(document))
    done = CliRunner().invoke(app, ["run", str(manifest), f"--output={tmp_path / 'run'}"])
    assert (done.exit_code, done.stderr.count("\n")) == (3, 1), "the first thing that is wrong is the model"
    assert "spec.models.actor.uri" in done.stderr
