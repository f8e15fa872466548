"""`rlhf tune` in its folder: which trials go on, what a second call repeats, and mistakes; no job trains here."""

import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rlhf_api.exit_codes import ExitCode
from rlhf_trainer.commands.cli import app
from rlhf_trainer.errors import NumericsError, Paused
from rlhf_trainer.run import deep_check, tuning
from rlhf_trainer.run.resume import from_the_start
from rlhf_trainer.run.stopping import Stopped
from rlhf_trainer.run_folder.folder import JobFolder, add_to_summary, load_with_finished

MANIFEST = Path(__file__).parents[3] / "examples" / "12-arithmetic-grpo.yaml"
RATES = {1e-4: 0.3, 1e-3: 0.6, 1e-2: 0.2, 0.1: None}
"""Learning rate -> reward of the trial; with the last one it fails."""


class Played:
    """Stands for training: a job is at its next pause, or has ended, at once; `stops` counts runs before a signal."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output, self.ran, self.stops = folder / "tuned", list[tuple[str, int]](), 100
        monkeypatch.setattr(tuning, "run_file", self.run_file)
        monkeypatch.setattr(tuning, "ray_session", lambda *_, **__: nullcontext())
        monkeypatch.setattr(deep_check, "problems", lambda *_: [])

    def run_file(
        self, manifest: Path, *, output: Path, overrides: Sequence[str], only: Sequence[str], **_: Any
    ) -> None:
        jobs = [each for each in load_with_finished(output, manifest, overrides) if each.name in only]
        job, starts = jobs[-1], from_the_start(jobs, output)
        if len(self.ran) == self.stops:
            raise Stopped(2)
        folder, total = JobFolder(output, job), job.spec.training.total_steps or 0
        step = job.spec.checkpoint.pause_after_step or total
        self.ran.append((output.name, step))
        if folder.finished():
            return
        optimizer = job.models()["actor"].optimizer
        value = RATES[optimizer.learning_rate] if optimizer and len(jobs) > 1 else 0.0
        folder.begin(folder.newest_checkpoint(), inputs=starts[job.name].inputs)
        if value is None:
            folder.fail(reason="Numerics", exit_code=ExitCode.NUMERICS, message="the loss is nan")
            raise NumericsError("the loss is nan\nand so on")
        folder.record({"step": step, "evaluation/reward": value}, total_steps=total, stage="GRPO")
        state = {"state.json": json.dumps({"step": step, "rows": 1, "digests": {}})}
        folder.checkpoints.complete(folder.checkpoints.begin(step), state | folder.texts_for_checkpoint(up_to=step))
        if step < total:
            raise Paused(f"step {step} is done")
        folder.made.mkdir()
        folder.succeed()
        add_to_summary(output, job.name, {"reward_before": 0.1, "reward_after": value})

    def tune(self, *words: str, measure: str = "evaluation/reward", budget: int = 250, vary: str = "") -> Result:
        vary = vary or f"models.actor.optimizer.learningRate={','.join(map(str, RATES))}"
        asked = ["--measure", measure, "--budget", str(budget), "--vary", vary, "--output", str(self.output)]
        return CliRunner().invoke(app, ["tune", str(MANIFEST), *asked, *words])


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tmp_path, monkeypatch)


def test_a_second_call_goes_on_without_repeating_a_rung(played: Played) -> None:
    played.stops = 3
    assert played.tune().exit_code == ExitCode.SIGINT
    assert played.ran == [("tuned", 1200), ("t1", 33), ("t2", 33)]
    played.stops = 100
    done = played.tune()
    assert done.exit_code == 0, done.output
    assert played.ran[3:] == [("tuned", 1200), ("t3", 33), ("t4", 33), ("t2", 100)]
    assert (played.output / "t2" / "arithmetic-sft" / "model").is_dir(), "a link to the job that all trials read"
    assert "t4 failed: the loss is nan" in done.output
    words = "--set arithmetic-grpo:models.actor.optimizer.learningRate=0.001"
    assert done.output.splitlines()[-1] == f"best: {played.output / 't2'} {words}"
    written = json.loads((played.output / "tune.json").read_text())
    assert [(each["step"], each["value"], each["reason"]) for each in written["trials"]] == [
        (33, 0.3, ""),
        (100, 0.6, ""),
        (33, 0.2, ""),
        (33, None, "the loss is nan"),
    ]
    assert played.tune().exit_code == 0
    assert played.ran[7:] == [("tuned", 1200), ("t4", 33)], "only the failed one is left"
    assert played.tune(budget=400).exit_code == 0
    assert played.ran[9:] == [("tuned", 1200), ("t1", 100), ("t3", 100), ("t4", 100)], "a larger budget"
    changed = played.tune("--set", "arithmetic-grpo:algorithm.clipRange=0.1")
    sentence = "is not what it was when the job began; use another --output"
    field = f"{played.output / 't1'}: arithmetic-grpo: spec.algorithm.clipRange"
    assert (changed.exit_code, changed.stderr) == (ExitCode.SPEC, f"error: {field}: {sentence}\n")
    shutil.rmtree(played.output)
    assert played.tune(budget=400).exit_code == 0
    played.ran.clear()
    smaller = played.tune()
    assert (smaller.exit_code, played.ran) == (0, [("tuned", 1200), ("t4", 33)]), "measures of later steps are taken"
    assert f"best: {played.output / 't2'} " in smaller.output
    shutil.rmtree(played.output)
    failed = played.tune(vary="models.actor.optimizer.learningRate=0.1,1e-1")
    assert (failed.exit_code, "no trial is left; t1 failed: the loss is nan" in failed.stderr) == (2, True)


def test_a_mistake_is_a_sentence_before_anything_runs(played: Played) -> None:
    rate = "models.actor.optimizer.learningRate"
    for options, sentence in (
        ({"vary": "models.actor.optimizer.lr=1,2"}, "optimizer.lr: unknown field; did you mean"),
        ({"vary": f"{rate}=1e-3,-1"}, f"spec.{rate}: is -1, expected more than 0"),
        ({"vary": "arithmetic-sft:training.seed=1,2"}, "all trials share arithmetic-sft"),
        ({"vary": "training.totalSteps=5,6"}, "--vary training.totalSteps=5,6: is the same in all trials"),
        ({"vary": "rollout.samplesPerPrompt=3,16"}, "spec.training.miniBatchSize: is 256, which does not divide"),
        ({"measure": "evaluation/accuracy"}, "is evaluation/accuracy, which arithmetic-grpo does not write"),
        ({"budget": 99}, "--budget: is 99 steps; 4 trials of 100 steps need 199 or more"),
    ):
        found = played.tune(**options)
        assert (found.exit_code, found.stderr.count("\n")) == (ExitCode.SPEC, 1), found.output
        assert sentence in found.stderr
    assert "--job: is arithmetic-gpo; did you mean arithmetic-grpo?" in played.tune("--job", "arithmetic-gpo").stderr
    alone = played.tune("--job", "arithmetic-sft", "--set", "arithmetic-sft:evaluation=null", budget=9999)
    assert "arithmetic-sft: spec.evaluation: is missing, a search needs it" in alone.stderr
    cases: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
        (("checkpoint.pauseAfterStep=50",), {}, "grpo: spec.checkpoint.pauseAfterStep: is set, but the search sets it"),
        (
            ("suspend=true",),
            {},
            f"{played.output / 't1'}: arithmetic-grpo: spec.suspend: is true, so the job is not run",
        ),
        (
            (),
            {"vary": "resources.device=CPU,GPU"},
            "arithmetic-grpo: spec.resources.device: is GPU, but there is no GPU",
        ),
        (
            ("evaluation.samplesPerPrompt=2",),
            {"vary": "evaluation.samplesPerPrompt=2,1", "measure": "evaluation/reward_pass_at_2"},
            f"{played.output / 't2'}: --measure: is evaluation/reward_pass_at_2, which arithmetic-grpo does not write",
        ),
    ]
    for words, own, sentence in cases:
        sets = (word for each in words for word in ("--set", f"arithmetic-grpo:{each}"))
        found = played.tune(*sets, **own)
        assert (found.exit_code, found.stderr.count("\n")) == (ExitCode.SPEC, 1), found.output
        assert sentence in found.stderr
    assert not played.ran
    assert not played.output.exists()


def test_measures_of_other_shared_jobs_are_not_taken(played: Played) -> None:
    words = ("--set", "arithmetic-sft:models.actor.optimizer.schedule=Constant")
    assert played.tune(*words).exit_code == 0
    ran = [*played.ran]
    longer = played.tune(*words, "--set", "arithmetic-sft:training.totalSteps=1300")
    sentence = "arithmetic-grpo: began with other inputs; use another --output"
    assert (longer.exit_code, longer.stderr) == (ExitCode.SPEC, f"error: {played.output / 't1'}: {sentence}\n")
    assert played.ran == ran


def test_the_only_trial_that_went_on_fails(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    run_file = played.run_file

    def fail_at_the_end(manifest: Path, **options: Any) -> None:
        if options["output"].name == "t2" and not any("pauseAfterStep" in each for each in options["overrides"]):
            raise NumericsError("the loss is inf")
        run_file(manifest, **options)

    monkeypatch.setattr(tuning, "run_file", fail_at_the_end)
    found = played.tune(budget=199)
    assert (found.exit_code, played.ran[-1]) == (ExitCode.SPEC, ("t4", 33)), found.output
    assert found.stderr == "error: no trial is left; t2 failed: the loss is inf\n"


def test_a_job_that_only_a_varied_value_names_is_shared(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, (first, second) = [], MANIFEST.read_text().split("\n---\n")
    text = "\n---\n".join([first, second, first.replace("arithmetic-sft", "other")])
    (played.output.parent / "jobs.yaml").write_text(text)
    monkeypatch.setattr(tuning, "run_file", lambda *_, output, only, **__: tuned.append((output.name, [*only])))
    words = ["--job", "arithmetic-grpo", "--vary", "models.actor.uri=job://arithmetic-sft,job://other"]
    words += ["--measure", "evaluation/reward", "--budget", "250", "--output", str(played.output)]
    found = CliRunner().invoke(app, ["tune", str(played.output.parent / "jobs.yaml"), *words])
    names = ["arithmetic-sft", "other", "arithmetic-grpo"]
    assert tuned == [("tuned", names[:2]), ("t1", names), ("t2", names)], found.output
