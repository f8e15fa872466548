"""`rlhf tune` on real Ray: killed and called again, its best trial is the run that was never stopped, to the bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.trainer.chain.conftest import ROOT, rlhf
from tests.trainer.chain.continued import numbers, wait_until
from tests.trainer.chain.leftovers import MARK, marked

MANIFEST, JOB = ROOT / "examples" / "12-arithmetic-grpo.yaml", "arithmetic-grpo"
STEERED = "{coefficient: 0, controller: LearningRate, target: 0.02, horizon: 128}"
SMALL = (
    "--set=arithmetic-sft:training.totalSteps=20",
    *(
        f"--set={JOB}:{each}"
        for each in (
            "training={totalSteps: 9, promptBatchSize: 8, miniBatchSize: 32}",
            f"algorithm.kl={STEERED}",
            "evaluation.data.limit=32",
            "rollout.samplesPerPrompt=8",
        )
    ),
)
VARIED = "models.actor.optimizer.learningRate=1e-3,2e-3"


@pytest.mark.slow
def test_a_tuned_trial_is_the_run_alone(tmp_path: Path) -> None:
    output = tmp_path / "tuned"
    words = ["tune", MANIFEST, "--vary", VARIED, "--measure=evaluation/reward", "--budget=12", "--output", output]
    command, environment = (
        [sys.executable, "-m", "rlhf_trainer", *map(str, words), *SMALL],
        {**os.environ, MARK: "tune"},
    )
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    wait_until((output / "t2" / JOB / "metrics.jsonl").exists)
    process.kill()
    process.wait(PATIENCE_SECONDS)
    for member in marked("tune"):
        member.kill()
    done = rlhf(*words, *SMALL)
    assert done.returncode == 0, done.stderr
    tuned = json.loads((output / "tune.json").read_text())
    best = max(tuned["trials"], key=lambda trial: trial["step"])
    assert sorted(trial["step"] for trial in tuned["trials"]) == [3, 9]
    events = (output / "t1" / JOB / "events.log").read_text()
    assert events.count("GRPO on") == 1 + (best["name"] == "t1"), "the rung before the kill is not repeated"
    alone = rlhf("run", MANIFEST, "--output", tmp_path / "alone", *SMALL, *(f"--set={each}" for each in best["sets"]))
    assert alone.returncode == 0, alone.stderr
    mine, whole = (
        [
            {name: value for name, value in record.items() if not name.startswith("evaluation/")}
            for record in numbers(folder / JOB)
        ]
        for folder in (output / best["name"], tmp_path / "alone")
    )
    assert mine == whole
    assert {record["learning_rate/factor"] for record in mine} > {1.0}
    weights = [folder / JOB / "model" / "model.safetensors" for folder in (output / best["name"], tmp_path / "alone")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
