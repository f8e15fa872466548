"""The CPU slots that a manifest leaves open are chosen for the file, and a run keeps them."""

import json
import re
from pathlib import Path

import pytest

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run import placement
from rlhf_trainer.run.placement import place_job, with_cpu_slots
from rlhf_trainer.run.resume import from_the_start
from rlhf_trainer.run_folder.folder import JobFolder

MANIFEST = Path(__file__).parents[3] / "examples" / "01-helpful-ppo.yaml"
LONG = "training.totalSteps=1000"
OPEN = ("resources.slotsPerNode=null", LONG)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(placement, "cores", lambda: 2)
    monkeypatch.setattr(placement, "gpu_count", lambda: 0)


def jobs(*overrides: str) -> list[Job]:
    return load(MANIFEST, overrides)


def slots(found: list[Job]) -> list[int | None]:
    return [job.spec.resources.slots_per_node for job in found]


def begun(output: Path, job: Job, count: int | None) -> JobFolder:
    """Leave what a run of a job with so many slots leaves, with a checkpoint."""
    folder = JobFolder(output, job.changed(resources={"slots_per_node": count}))
    folder.begin(None, inputs=from_the_start(jobs(*OPEN), output)[job.name].inputs)
    folder.record({"step": 1}, total_steps=9, stage="SFT")
    texts = folder.texts_for_checkpoint(up_to=1)
    state = {"step": 1, "rows": 1, "digests": {}}
    folder.checkpoints.complete(folder.checkpoints.begin(1), {"state.json": json.dumps(state), **texts})
    return folder


def test_the_jobs_of_a_file_get_the_same_slots(tmp_path: Path) -> None:
    found, sentence = with_cpu_slots(jobs(*OPEN), tmp_path)
    assert slots(found) == [2, 2, 2]
    together = "the steps of all jobs together are predicted to take"
    told = rf"2 CPU slots of 1 thread: {together} 1\.\d\d times as long on 1 CPU slot"
    assert re.fullmatch(told, sentence), sentence


def test_few_steps_keep_one_slot_and_it_is_said(tmp_path: Path) -> None:
    found, sentence = with_cpu_slots(jobs(OPEN[0], "training.totalSteps=1"), tmp_path)
    assert slots(found) == [1, 1, 1]
    together = "the steps of all jobs together are predicted to take"
    told = rf"1 CPU slot of 2 threads: {together} \d\.\d\d times as long on 2 CPU slots"
    assert re.fullmatch(told, sentence), sentence
    epochs = jobs(OPEN[0], "training.totalSteps=null", "training.totalEpochs=2")
    found, sentence = with_cpu_slots(epochs, tmp_path)
    assert (slots(found), sentence[-34:]) == ([1, 1, 1], "the number of steps is not known yet"[-34:])


def test_slots_that_are_given_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_cpu_slots(jobs(LONG), tmp_path) == (jobs(LONG), "")
    assert slots(with_cpu_slots(jobs(*OPEN, "helpful-rm:resources.slotsPerNode=4"), tmp_path)[0]) == [2, 4, 2]
    pools = "helpful-sft:placement.pools=[{name: all, models: [actor], slotsPerNode: 1}]"
    by_hand = jobs(LONG, OPEN[0], "helpful-sft:placement.mode=Manual", pools)[:1]
    assert with_cpu_slots(by_hand, tmp_path) == (by_hand, "")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    told = "1 CPU slot: OMP_NUM_THREADS=2 gives its threads; without that the slots are chosen"
    assert with_cpu_slots(jobs(*OPEN), tmp_path) == (jobs(*OPEN), told)
    assert with_cpu_slots(jobs(LONG), tmp_path)[1] == "", "the manifest says the slots"


def test_a_job_that_works_ahead_gets_a_slot_for_each_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = jobs(OPEN[0], "training.totalSteps=1", "helpful-ppo:rollout.maxStaleness=1")
    found, sentence = with_cpu_slots(ahead, tmp_path)
    alone = "2 CPU slots of 1 thread: no other number divides cores and batches and has a slot for each pool"
    assert (slots(found), sentence) == ([2] * 3, alone)
    assert {pool.size for pool in place_job(found[-1], (0,), found, tmp_path).mapping.pools} == {1}
    begun(tmp_path, jobs(*OPEN)[0], 1)
    assert slots(with_cpu_slots(ahead, tmp_path)[0]) == [2] * 3, "one slot is not enough to go on with"
    monkeypatch.setattr(placement, "cores", lambda: 1)
    assert slots(with_cpu_slots(ahead, tmp_path)[0]) == [2] * 3
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    needs = "helpful-ppo: spec.rollout.maxStaleness takes another slot for the rollout, but there is 1 x cpu-slot"
    with pytest.raises(EnvironmentProblem, match=f"^{needs}; 2 x cpu-slot would do$"):
        place_job(with_cpu_slots(ahead, tmp_path)[0][-1], (0,), ahead, tmp_path)


def test_gpus_are_not_cpu_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "gpu_count", lambda: 1)
    assert slots(with_cpu_slots(jobs(*OPEN), tmp_path)[0]) == [None] * 3
    assert slots(with_cpu_slots(jobs(*OPEN, "resources.device=CPU"), tmp_path)[0]) == [2] * 3


@pytest.mark.parametrize("count", [None, 1], ids=["of an earlier version", "chosen then"])
def test_a_run_goes_on_with_its_slots(tmp_path: Path, count: int | None) -> None:
    begun(tmp_path, jobs(*OPEN)[0], count)
    found, sentence = with_cpu_slots(jobs(*OPEN), tmp_path)
    assert (slots(found), sentence) == ([1] * 3, f"1 CPU slot of 2 threads: as the run in {tmp_path} began")
    assert slots(with_cpu_slots(jobs(*OPEN), tmp_path, restart=True)[0]) == [2] * 3


def test_a_checkpoint_elsewhere_says_the_slots(tmp_path: Path) -> None:
    elsewhere = (*OPEN, f"checkpoint.storage={(tmp_path / 'store').as_uri()}")
    begun(tmp_path / "run", jobs(*elsewhere)[0], 1)
    (tmp_path / "run" / "helpful-sft" / "job.yaml").unlink()
    assert slots(with_cpu_slots(jobs(*elsewhere), tmp_path / "run")[0]) == [1] * 3
