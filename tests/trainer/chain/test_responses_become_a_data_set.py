"""Jobs of Generate: what they write, what reads it, and what a run that was killed goes on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.chain.conftest import ROOT, records, rlhf
from tests.trainer.tiny import save_tiny

PROMPTS, SAMPLES, STEPS = 36, 4, 5
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
MANIFEST = """
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {{name: pairs}}
spec:
  algorithm: {{name: Generate, rows: Pairs}}
  models:
    actor: {{uri: "file://{model}"}}
    reward: {{entrypoint: "tests.trainer.chain.test_responses_become_a_data_set:by_length"}}
  data:
    train: {{uri: "file://{data}", promptKey: question, columns: [number]}}
    maxPromptTokens: 32
    maxResponseTokens: 64
  rollout: {{samplesPerPrompt: {samples}}}
  training: {{totalEpochs: 1, promptBatchSize: 8}}
  checkpoint: {{everySteps: 1}}
---
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {{name: dpo}}
spec:
  algorithm: {{name: DPO}}
  models: {{actor: {{uri: "file://{model}"}}}}
  data: {{train: {{uri: "job://pairs"}}, maxPromptTokens: 32, maxResponseTokens: 400}}
  training: {{totalSteps: 2, batchSize: 4}}
"""


def by_length(prompts: list[str], responses: list[str], finished: list[bool], *, number: list[int]) -> list[float]:
    """A reward: the length of the response."""
    assert len(prompts) == len(finished) == len(number)
    return [float(len(response)) for response in responses]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("responses")
    model = save_tiny(folder / "model", seed=0)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows = [
        {"question": [{"role": "user", "content": f"What is {number}?"}], "number": number} for number in range(PROMPTS)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "jobs.yaml"
    file.write_text(MANIFEST.format(model=model, data=folder / "data.jsonl", samples=SAMPLES))
    return file


@pytest.fixture(scope="module")
def output(manifest: Path) -> Path:
    """The run folder of both jobs, on two slots."""
    folder = manifest.parent / "run"
    done = rlhf("run", manifest, f"--output={folder}", "--set=resources.slotsPerNode=2")
    assert done.returncode == 0, done.stderr
    return folder


def written(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "pairs" / "data" / "responses.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_pairs_have_the_prompts_of_the_file_in_order(output: Path) -> None:
    rows, measured = written(output), json.loads((output / "summary.json").read_text())["pairs"]
    numbers = [row["number"] for row in rows]
    assert numbers == sorted(set(numbers))
    assert 3 < len(rows) < PROMPTS
    for row in rows:
        assert row["prompt"] == [{"role": "user", "content": f"What is {row['number']}?"}]
        assert row["chosen_reward"] == len(row["chosen"])
        assert row["rejected_reward"] == len(row["rejected"])
    counted = {name: measured[name] for name in ("prompts", "responses", "rows")}
    assert counted == {"prompts": PROMPTS, "responses": PROMPTS * SAMPLES, "rows": len(rows)}
    assert measured["reward"] < measured["reward_best"]
    assert not (output / "pairs" / "model").exists()


@pytest.mark.slow
def test_what_was_written_is_learned_from(output: Path) -> None:
    assert [line["step"] for line in records(output / "dpo")] == [1, 2]
    assert (output / "dpo" / "model").is_dir()


@pytest.mark.slow
def test_the_reader_shows_the_rows_that_were_written(manifest: Path, output: Path) -> None:
    shown = rlhf("data", manifest, "--job=dpo", f"--output={output}")
    assert f"{len(written(output))} rows are read, 0 are left out" in shown.stdout, shown.stderr
    missing = rlhf("data", manifest, "--job=dpo", f"--output={output.parent / 'nowhere'}")
    assert missing.returncode != 0
    assert missing.stderr == "error: dpo: spec.data.train.uri: job://pairs has not been written; run its job first\n"


@pytest.mark.slow
def test_a_run_that_was_killed_writes_the_same_rows_once(manifest: Path, output: Path) -> None:
    folder = manifest.parent / "killed"
    arguments = ["run", str(manifest), f"--output={folder}", "--set=resources.slotsPerNode=1"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "rlhf_trainer", *arguments]
    running = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    checkpoints = folder / "pairs" / "checkpoints"
    while not (list(checkpoints.glob("step-*2/state.json"))) and running.poll() is None:
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    done = rlhf(*arguments)
    assert done.returncode == 0, done.stderr
    assert "goes on after step" in (folder / "pairs" / "events.log").read_text()
    assert [line["step"] for line in records(folder / "pairs")] == list(range(1, STEPS + 1))
    assert written(folder) == written(output)
    both = [json.loads((each / "summary.json").read_text())["pairs"] for each in (folder, output)]
    assert both[0].pop("end_tokens") == both[1].pop("end_tokens")
    first, second = ({name: value for name, value in each.items() if name != "seconds"} for each in both)
    assert first == pytest.approx(second)
