"""Which jobs a run folder still needs, where each goes on, and what its folder then holds."""

import json
import shutil
from pathlib import Path
from typing import Self

import pytest
from typer.testing import CliRunner

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_trainer.checkpoint import Checkpoint
from rlhf_trainer.commands.cli import app
from rlhf_trainer.errors import ConfigError, DataError, EnvironmentProblem, NumericsError
from rlhf_trainer.outputs.display import display_for
from rlhf_trainer.run.chain import starts_of
from rlhf_trainer.run.checkpoints import KeptCheckpoints
from rlhf_trainer.run.job_run import require_measure
from rlhf_trainer.run.resume import Start, from_the_start, unfinished
from rlhf_trainer.run.stopping import StopSignals
from rlhf_trainer.run_folder.evidence import EMPTY
from rlhf_trainer.run_folder.folder import METRICS, JobFolder, add_to_summary, load_with_finished
from rlhf_trainer.workers.data import DataShape

MANIFEST = Path(__file__).parents[3] / "examples" / "01-helpful-ppo.yaml"
NAMES = ["helpful-sft", "helpful-rm", "helpful-ppo"]


def jobs(*overrides: str) -> list[Job]:
    return load(MANIFEST, overrides)


def run(
    output: Path,
    name: str,
    *overrides: str,
    steps: int = 9,
    saved_at: int | None = None,
    ends: bool = False,
) -> JobFolder:
    """What a run of `steps` steps of a job leaves, with a checkpoint after one of them."""
    chain = jobs(*overrides)
    folder = JobFolder(output, next(job for job in chain if job.name == name))
    folder.begin(None, inputs=from_the_start(chain, output)[name].inputs)
    for step in range(1, steps + 1):
        folder.record({"step": step, "loss/policy": 0.5}, total_steps=9, stage="PPO")
    if saved_at is not None:
        texts = folder.texts_for_checkpoint(up_to=saved_at)
        uri = folder.checkpoints.begin(saved_at)
        state = {"step": saved_at, "rows": 100, "digests": {"spec.data.train": "abc"}}
        folder.checkpoints.complete(uri, {"state.json": json.dumps(state), **texts})
    if ends:
        folder.made.mkdir()
        folder.succeed()
    return folder


def starts(output: Path, *overrides: str) -> dict[str, int | None]:
    """Name -> the step after which the job goes on."""
    found = unfinished(jobs(*overrides), output)
    return {name: start.checkpoint.step if start.checkpoint else None for name, start in found.items()}


def finish(output: Path, *overrides: str) -> None:
    """What a run of the whole chain leaves."""
    for name in NAMES:
        run(output, name, *overrides, saved_at=9, ends=True)


def test_a_job_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    assert starts(tmp_path) == dict.fromkeys(NAMES)
    for name in ("helpful-sft", "helpful-rm"):
        run(tmp_path, name, saved_at=9, ends=True)
    assert starts(tmp_path) == {"helpful-ppo": None}
    run(tmp_path, "helpful-ppo", steps=3)
    assert starts(tmp_path) == {"helpful-ppo": None}
    run(tmp_path, "helpful-ppo", steps=3, saved_at=2)
    assert starts(tmp_path) == {"helpful-ppo": 2}


def start_at(checkpoint: Checkpoint | None) -> Start:
    return Start(checkpoint=checkpoint, inputs={}, evidence=EMPTY, begin_hashing=lambda _: lambda _: None)


class Damaged:
    """A model that cannot be restored."""

    def restore(self, *, uri: str) -> Self:  # noqa: ARG002
        return self

    def result(self) -> None:
        raise NumericsError("weight is not what was written (checksum)")


def resumed(folder: JobFolder, *, digest: str) -> KeptCheckpoints:
    """With data of a digest."""
    data = DataShape(rows=100, total_steps=7, evaluation_rows=0, facts=(), digests={"spec.data.train": digest})
    stop, start = (
        StopSignals(lambda message: None),
        start_at(folder.newest_checkpoint()),
    )
    return KeptCheckpoints(jobs()[0], folder, {"actor": Damaged()}, ["actor"], data=data, stop=stop, start=start)


def test_a_damaged_checkpoint_is_not_chosen_again(tmp_path: Path) -> None:
    folder = run(tmp_path, "helpful-sft", saved_at=5)
    with pytest.raises(NumericsError, match=r"checksum\); a run goes on from the checkpoint before it"):
        resumed(folder, digest="abc").restore()
    assert starts(tmp_path)["helpful-sft"] is None


class Saved:
    """A model whose state is empty."""

    def begin_checkpoint(self, **_: object) -> Self:
        return self

    end_checkpoint = restore = begin_checkpoint

    def result(self) -> list[str]:
        """The checksum of its one rank."""
        return ["0a1b2c3d"]


BEST = ("helpful-sft:checkpoint={keepBest: loss, keepLast: 1}", "helpful-sft:evaluation.everySteps=1")


def keeping_the_best(folder: JobFolder) -> KeptCheckpoints:
    data = DataShape(rows=100, total_steps=7, evaluation_rows=4, facts=(), digests={"spec.data.train": "abc"})
    stop, start = (
        StopSignals(lambda message: None),
        start_at(folder.newest_checkpoint()),
    )
    kept = KeptCheckpoints(jobs(*BEST)[0], folder, {"actor": Saved()}, ["actor"], data=data, stop=stop, start=start)
    kept.restore()
    return kept


def marked_best(output: Path) -> list[str]:
    """The checkpoints that `rlhf checkpoints` says are the best by the loss."""
    lines = CliRunner().invoke(app, ["checkpoints", str(output)]).stdout.splitlines()
    return [line.split()[0] for line in lines if line.endswith("whole, best by loss")]


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path: Path) -> None:
    folder = run(tmp_path, "helpful-sft", *BEST)

    def measure(kept: KeptCheckpoints, step: int, loss: float, *, is_last: bool = False) -> list[int]:
        kept.after_record(step, lambda: {"model": "actor"}, is_last=is_last, measured={"evaluation/loss": loss})
        return [found.step for found in folder.checkpoints.all()]

    kept = keeping_the_best(folder)
    assert [measure(kept, step, loss) for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0))] == [[1], [2], [2]]
    again = keeping_the_best(folder)
    assert measure(again, 4, 1.5) == [2]
    assert marked_best(tmp_path) == ["step-000002"]
    assert measure(again, 5, 0.5) == [5]
    assert measure(again, 6, 0.7, is_last=True) == [5, 6]
    assert (again.best_step(6, {"loss": 0.7}), again.best_step(6, {"loss": 0.4})) == (
        {"best_step": 5},
        {"best_step": 6},
    )
    assert marked_best(tmp_path) == ["step-000005"]
    folder.made.mkdir()
    folder.succeed()
    add_to_summary(tmp_path, "helpful-sft", again.best_step(6, {"loss": 0.4}))
    assert marked_best(tmp_path) == ["step-000006"]


def test_an_unknown_measure_is_named_before_the_first_step() -> None:
    job = jobs(*BEST)[0]
    require_measure(job, ["loss"])
    with pytest.raises(
        ConfigError, match=r"^helpful-sft: spec\.checkpoint\.keepBest: loss is not measured; there are a"
    ):
        require_measure(job, ["a", "b"])


def test_a_damaged_checkpoint_without_mark_is_still_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise EnvironmentProblem("the disk is read-only")

    kept = resumed(run(tmp_path, "helpful-sft", saved_at=5), digest="abc")
    monkeypatch.setattr(Checkpoint, "condemn", refuse)
    with pytest.raises(NumericsError, match=r"checksum\); nor could that be noted there \(the disk is read-only\)"):
        kept.restore()


def test_other_rows_than_those_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    folder = run(tmp_path, "helpful-sft", saved_at=5)
    with pytest.raises(DataError, match=r"^helpful-sft: spec\.data\.train: its rows, or their order, are not those"):
        resumed(folder, digest="abd").restore()
    assert starts(tmp_path)["helpful-sft"] == 5


@pytest.mark.parametrize("file", ["status.json", "inputs.json", "job.yaml"])
@pytest.mark.parametrize("text", ["", "[1]", '{"phase": "Runn', "\ufeff\ud800", "a: [" * 5000])
def test_a_damaged_file_of_a_finished_job_is_named(tmp_path: Path, file: str, text: str) -> None:
    finish(tmp_path)
    (tmp_path / "helpful-sft" / file).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(EnvironmentProblem, match=rf"^{tmp_path}/helpful-sft\S*: is not as a run left it: "):
        unfinished(load_with_finished(tmp_path, MANIFEST, []), tmp_path)


def test_a_damaged_state_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    folder = run(tmp_path, "helpful-sft", saved_at=9)
    uri = folder.checkpoints.begin(12)
    texts = {"state.json": "{}", **folder.texts_for_checkpoint(up_to=9)}
    folder.checkpoints.complete(uri, texts)
    with pytest.raises(EnvironmentProblem, match=r"step-000012: is not as a run left it: KeyError: 'rows'"):
        unfinished(jobs(), tmp_path)


def test_records_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    folder = run(tmp_path, "helpful-ppo", steps=5, saved_at=3)
    folder.begin(folder.checkpoints.newest(), inputs={})
    steps = [json.loads(line)["step"] for line in (folder.path / METRICS).read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert json.loads((folder.path / "status.json").read_text())["checkpoint"]["step"] == 3
    folder.begin(None, inputs={})
    assert not (folder.path / METRICS).exists()
    assert folder.checkpoints.all() == []


def test_what_read_the_output_of_another_experiment_starts_over(tmp_path: Path) -> None:
    finish(tmp_path)
    constant = "helpful-sft:models.actor.optimizer.schedule=Constant"
    run(tmp_path, "helpful-sft", constant, saved_at=9, ends=True)
    assert starts(tmp_path, constant) == {"helpful-rm": None, "helpful-ppo": None}
    longer = (constant, "helpful-sft:training.totalSteps=200")
    assert starts(tmp_path, *longer) == {"helpful-sft": 9, "helpful-rm": None, "helpful-ppo": None}
    run(tmp_path, "helpful-sft", *longer, saved_at=9, ends=True)  # by itself, from a manifest with one document
    assert starts(tmp_path, *longer) == {"helpful-rm": None, "helpful-ppo": None}


def test_what_read_a_job_that_only_ends_once_more_goes_on(tmp_path: Path) -> None:
    finish(tmp_path)
    run(tmp_path, "helpful-ppo", saved_at=7)
    shutil.rmtree(tmp_path / "helpful-sft" / "model")
    assert starts(tmp_path) == {"helpful-sft": 9, "helpful-ppo": 7}


def test_a_finished_job_can_be_made_longer(tmp_path: Path) -> None:
    finish(tmp_path)
    longer = "helpful-ppo:training.totalSteps=99"
    assert starts(tmp_path, longer) == {"helpful-ppo": 9}
    with pytest.raises(SpecError, match=r"helpful-ppo: spec.training: gives 3 steps, but 9 are done"):
        starts(tmp_path, "helpful-ppo:training.totalSteps=3")
    shutil.rmtree(tmp_path / "helpful-ppo" / "checkpoints")
    assert starts(tmp_path) == {}
    with pytest.raises(SpecError, match=r"helpful-ppo: spec.training.totalSteps: .* no checkpoint is left"):
        starts(tmp_path, longer)


def test_checkpoints_are_found_where_the_last_run_kept_them(tmp_path: Path) -> None:
    output, storage = tmp_path / "run", f"helpful-ppo:checkpoint.storage=file://{tmp_path}/storage"
    finish(output)
    run(output, "helpful-ppo", saved_at=4)
    assert starts(output, storage) == {"helpful-ppo": 4}
    run(output, "helpful-ppo", storage, saved_at=6)
    assert starts(output) == {"helpful-ppo": 6}
    shutil.rmtree(output / "helpful-ppo")
    assert starts(output, storage) == {"helpful-ppo": 6}, "the disk is gone, the storage is not"


def test_another_run_folder_has_its_own_place_in_storage(tmp_path: Path) -> None:
    storage = f"checkpoint.storage=file://{tmp_path}/storage"
    run(tmp_path / "one", "helpful-sft", storage, saved_at=5)
    assert starts(tmp_path / "two", storage) == dict.fromkeys(NAMES)
    run(tmp_path / "two", "helpful-sft", storage)
    assert starts(tmp_path / "one", storage)["helpful-sft"] == 5


def test_another_experiment_is_refused_at_once(tmp_path: Path) -> None:
    finish(tmp_path)
    with pytest.raises(SpecError) as refused:
        starts(tmp_path, "helpful-sft:training.seed=3", "helpful-sft:data.train.limit=5")
    assert [problem.path for problem in refused.value.problems] == [
        "helpful-sft: spec.data.train.limit",
        "helpful-sft: spec.training.seed",
    ]


def test_a_restart_leaves_what_a_link_leads_to(tmp_path: Path) -> None:
    """`rlhf reproduce` links the jobs that its job reads."""
    finish(tmp_path / "first")
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / NAMES[0]).symlink_to(tmp_path / "first" / NAMES[0])
    with pytest.raises(SpecError, match=r"is a link to .*first/helpful-sft, which --restart would clear"):
        starts_of(jobs(), tmp_path / "again", display_for(jobs()), restart=True, given={})
    assert starts(tmp_path / "first") == {}
    assert JobFolder(tmp_path / "first", jobs()[0]).newest_checkpoint()


def test_a_manifest_reads_what_has_finished_in_the_folder(tmp_path: Path) -> None:
    grpo = MANIFEST.with_name("02-helpful-grpo.yaml")
    with pytest.raises(SpecError, match="no job of this file, or finished in the run folder"):
        load_with_finished(tmp_path, grpo, [])
    for name in ("helpful-sft", "helpful-rm"):
        run(tmp_path, name, ends=True)
    (job,) = load_with_finished(tmp_path, grpo, [])
    before = unfinished([job], tmp_path)["helpful-grpo"].inputs
    assert before.keys() == {"helpful-sft", "helpful-rm"}
    JobFolder(tmp_path, job).begin(None, inputs=before)
    run(tmp_path, "helpful-rm", "helpful-rm:training.seed=5", ends=True)
    after = unfinished([job], tmp_path)["helpful-grpo"].inputs
    assert before["helpful-sft"] == after["helpful-sft"]
    assert before["helpful-rm"] != after["helpful-rm"]
