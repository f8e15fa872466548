"""`rlhf samples` shows responses of the training that were kept: of a step, the worst or the best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_trainer.commands.cli import app
from rlhf_trainer.run_folder.folder import JobFolder
from rlhf_trainer.run_folder.rollouts import ROLLOUTS, read_step_rollouts
from tests.trainer import jobs

SPEC = {
    "algorithm": {"name": "SFT"},
    "models": {"actor": {"uri": "hf://a/b"}},
    "data": {"train": {"uri": "hf://a/b"}},
    "training": {"batchSize": 4, "totalSteps": 1},
}


def line(step: int, row: int, reward: float, response: str = "answer") -> dict[str, Any]:
    return {
        "step": step,
        "row": row,
        "prompt": f"question {row}",
        "response": f"{response} {row} [of {step}]",
        "reward": reward,
        "reward_parts": {"length": 1.0, "right": reward},
        "advantage": reward - 1,
        "finished": row > 0,
        "prompt_tokens": 3,
        "response_tokens": 4,
        "policy_version": step - 1,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with three steps; the second was run twice, and the last line is half written."""
    folder = JobFolder(tmp_path / "run", jobs.job(tmp_path, "grpo", SPEC))
    folder.begin(None, inputs={})
    rows = [line(1, 0, 0.5), line(2, 0, 9.0), line(2, 0, 1.0, "again"), *(line(3, row, row * 0.25) for row in range(4))]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder.path / ROLLOUTS).write_text(text + '{"step": 3, "row": 9, "pro')
    return tmp_path / "run"


def shown(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["samples", *map(str, arguments)])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_the_worst_of_the_last_step_come_first(run: Path) -> None:
    text = shown(run, "--worst", 2)
    assert text.startswith("grpo, step 3: the 2 of 4 kept responses with the lowest reward\n")
    assert text.index("answer 0 [of 3]") < text.index("answer 1 [of 3]")
    assert "answer 2" not in text
    assert "row 0, reward 0, advantage -1, prompt_tokens 3, response_tokens 4, policy_version 2, " in text
    assert "reward_part/length 1, reward_part/right 0, cut off" in " ".join(text.split())


def test_each_job_is_shown_under_its_name(run: Path, tmp_path: Path) -> None:
    other = JobFolder(run, jobs.job(tmp_path, "later", SPEC))
    other.begin(None, inputs={})
    (other.path / ROLLOUTS).write_text(json.dumps(line(7, 0, 0.5, "else")) + "\n")
    text = shown(run, "--worst", 1)
    heads = [each.partition(":")[0] for each in text.splitlines() if "kept responses" in each]
    assert heads == ["grpo, step 3", "later, step 7"]
    assert "grpo" not in shown(run, "--job", "later")


def test_the_best_of_a_step(run: Path) -> None:
    text = shown(run, "--step", 3, "--best", 1)
    assert "answer 3 [of 3]" in text
    assert "answer 2" not in text


def test_of_a_step_that_was_run_twice_the_last_counts(run: Path) -> None:
    (row,) = read_step_rollouts(run / "grpo" / ROLLOUTS, 2)
    assert row["response"] == "again 0 [of 2]"


@pytest.mark.parametrize(
    ("options", "sentence"),
    {
        "a step without any": (["--step", "7"], "has no responses of step 7"),
        "another job": (["--job", "ppo"], "no job ppo has begun in it"),
    }.values(),
)
def test_what_is_not_there_is_told(options: list[str], sentence: str, run: Path) -> None:
    done = CliRunner().invoke(app, ["samples", str(run), *options])
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_a_run_that_kept_none_says_how(run: Path) -> None:
    (run / "grpo" / ROLLOUTS).unlink()
    done = CliRunner().invoke(app, ["samples", str(run)])
    assert (done.exit_code, done.stderr.strip().endswith("no rollouts were kept; see rollout.keep")) == (2, True)


@pytest.mark.parametrize("edited", ['"cost": "z"', '"reward_parts": [1]', '"reward_parts": {"a": null}'])
def test_a_value_that_is_no_number_is_left_out(edited: str, run: Path) -> None:
    with (run / "grpo" / ROLLOUTS).open("w") as file:
        file.write(f'{{"step": 9, "row": 0, "prompt": "a", "response": "b", "reward": 1.5, {edited}}}\n')
    assert "row 0, reward 1.5, cut off" in shown(run)
