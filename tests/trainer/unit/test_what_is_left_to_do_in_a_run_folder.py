"""Which jobs a run folder still needs, where each goes on, and what its folder then holds."""

import json
import shutil
from pathlib import Path

import pytest

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_trainer.run.folder import METRICS, JobFolder
from rlhf_trainer.run.resume import unfinished

MANIFEST = Path(__file__).parents[3] / "examples" / "01-helpful-ppo.yaml"
NAMES = ["helpful-sft", "helpful-rm", "helpful-ppo"]


def jobs(*overrides: str) -> list[Job]:
    return load(MANIFEST, overrides)


def run(output: Path, job: Job, *, steps: int, saved_at: int | None = None, ends: bool = False) -> JobFolder:
    """What a run of `steps` steps leaves, with a checkpoint after one of them."""
    folder = JobFolder(output, job)
    folder.begin(None)
    for step in range(1, steps + 1):
        folder.record({"step": step, "loss/policy": 0.5}, total_steps=9, stage="PPO")
    if saved_at is not None:
        texts = folder.texts_for_checkpoint(up_to=saved_at)
        uri = folder.checkpoints.begin(saved_at)
        folder.checkpoints.complete(uri, {"state.json": json.dumps({"step": saved_at, "rows": 100}), **texts})
    if ends:
        folder.model.mkdir()
        folder.succeed()
    return folder


def starts(output: Path, *overrides: str) -> dict[str, int | None]:
    """Name -> the step after which the job goes on."""
    return {name: found.step if found else None for name, found in unfinished(jobs(*overrides), output).items()}


def test_a_job_goes_on_from_its_newest_checkpoint_and_a_finished_one_not_at_all(tmp_path: Path) -> None:
    sft, reward, ppo = jobs()
    assert starts(tmp_path) == dict.fromkeys(NAMES)
    for job in (sft, reward):
        run(tmp_path, job, steps=9, saved_at=9, ends=True)
    assert starts(tmp_path) == {"helpful-ppo": None}
    run(tmp_path, ppo, steps=3)
    assert starts(tmp_path) == {"helpful-ppo": None}
    run(tmp_path, ppo, steps=3, saved_at=2)
    assert starts(tmp_path) == {"helpful-ppo": 2}


def test_records_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    ppo = jobs()[-1]
    folder = run(tmp_path, ppo, steps=5, saved_at=3)
    folder.begin(folder.checkpoints.newest())
    steps = [json.loads(line)["step"] for line in (folder.path / METRICS).read_text().splitlines()]
    assert steps == [1, 2, 3]
    folder.begin(None)
    assert not (folder.path / METRICS).exists()
    assert folder.checkpoints.all() == []


def test_what_reads_the_output_of_a_job_that_runs_again_starts_over(tmp_path: Path) -> None:
    sft, reward, ppo = jobs()
    run(tmp_path, sft, steps=2, saved_at=2)
    run(tmp_path, reward, steps=9, saved_at=9, ends=True)
    run(tmp_path, ppo, steps=3, saved_at=3)
    assert starts(tmp_path) == {"helpful-sft": 2, "helpful-rm": None, "helpful-ppo": None}


def test_a_finished_job_can_be_made_longer_while_it_has_a_checkpoint(tmp_path: Path) -> None:
    for job in jobs():
        run(tmp_path, job, steps=9, saved_at=9, ends=True)
    longer = "helpful-ppo:training.totalSteps=99"
    assert starts(tmp_path, longer) == {"helpful-ppo": 9}
    with pytest.raises(SpecError, match=r"helpful-ppo: spec.training: gives 3 steps, but 9 are done"):
        starts(tmp_path, "helpful-ppo:training.totalSteps=3")
    shutil.rmtree(tmp_path / "helpful-ppo" / "checkpoints")
    assert starts(tmp_path) == {}
    with pytest.raises(SpecError, match=r"helpful-ppo: spec.training.totalSteps: .* no checkpoint is left"):
        starts(tmp_path, longer)


def test_another_experiment_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    for job in jobs():
        run(tmp_path, job, steps=9, ends=True)
    with pytest.raises(SpecError) as refused:
        starts(tmp_path, "training.seed=3", "helpful-rm:data.train.limit=5")
    assert [problem.path for problem in refused.value.problems] == [
        "helpful-sft: spec.training.seed",
        "helpful-rm: spec.data.train.limit",
        "helpful-rm: spec.training.seed",
        "helpful-ppo: spec.training.seed",
    ]
