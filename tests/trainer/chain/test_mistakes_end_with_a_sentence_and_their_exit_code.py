"""What a user does wrong is one sentence on stderr and the exit code of its kind, without a traceback."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.trainer.chain.conftest import MANIFEST, ROOT, rlhf

BEFORE_RAY = {
    "an unknown field": (["--set=helpful-ppo:algorithm.clipRnage=0.1"], 2, "did you mean clipRange?"),
    "a batch that does not divide": (["--set=helpful-sft:training.batchSize=33"], 2, "spec.training.batchSize"),
    "a model that is not there": (
        ["--set=helpful-sft:models.actor.uri=file:///nowhere"],
        3,
        "helpful-sft: spec.models.actor.uri: file:///nowhere",
    ),
    "an output that is a file": ([f"--output={__file__}"], 4, "cannot be written"),
}


@pytest.mark.parametrize("case", BEFORE_RAY)
def test_a_mistake_is_told_before_anything_starts(case: str, tmp_path: Path) -> None:
    options, code, sentence = BEFORE_RAY[case]
    done = rlhf("run", MANIFEST, f"--output={tmp_path / 'run'}", *options)
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_mistake_in_the_data_reaches_the_user_from_the_worker(tmp_path: Path) -> None:
    done = rlhf("run", MANIFEST, f"--output={tmp_path / 'run'}", "--set=helpful-sft:data.train.promptKey=nope")
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: spec.data.train.promptKey:")
    assert "Traceback" not in done.stderr
    status = json.loads((tmp_path / "run" / "helpful-sft" / "status.json").read_text())
    assert (status["phase"], status["lastFailure"]["exitCode"]) == ("Failed", 3)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_stops_the_run_and_leaves_nothing_running(number: signal.Signals, tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [sys.executable, "-m", "rlhf_trainer.cli", "run", str(MANIFEST), f"--output={output}"]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = output / "helpful-sft" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.is_file() and time.monotonic() < deadline:
        time.sleep(0.2)
    family = psutil.Process(running.pid).children(recursive=True)
    assert len(family) > 3, "Ray and the workers"
    running.send_signal(number)
    _, errors = running.communicate(timeout=100)
    assert running.returncode == 128 + number, errors
    assert errors.strip() == f"error: stopped by {number.name}"
    status = json.loads((output / "helpful-sft" / "status.json").read_text())
    assert (status["phase"], status["lastFailure"]["exitCode"]) == ("Stopped", 128 + number)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, "something of the run is still there"
