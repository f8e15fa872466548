"""`rlhf why` on run folders, and the same in the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rlhf_api.exit_codes import ExitCode
from rlhf_trainer.commands.cli import app
from rlhf_trainer.report.page import write_report
from rlhf_trainer.why.seen import Seen
from tests.trainer.why.plants import FIGURES, read

JOB = "helpful-ppo"


def write(folder: Path, seen: Seen) -> Path:
    """A run folder with one job, as a run leaves it."""
    job = folder / JOB
    job.mkdir(parents=True)
    document = {"apiVersion": "rlhf.hybridflow.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": JOB}}
    (job / "job.yaml").write_text(yaml.safe_dump({**document, "spec": seen.spec}))
    (job / "status.json").write_text(json.dumps({"phase": "Succeeded"}))
    for name, lines in (("metrics.jsonl", seen.records), ("rollouts.jsonl", seen.rows)):
        (job / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: `bad` rewards cut responses, `good` is healthy."""
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "good", read("healthy-ppo")[FIGURES[0]])
    (folder / "good" / "summary.json").write_text(json.dumps({JOB: {"rule_before": 0.117}}))
    write(folder / "bad", read("cut-pays")[FIGURES[0]])
    return folder


def asked(*arguments: object, code: int = ExitCode.OK) -> str:
    result = CliRunner().invoke(app, ["why", *map(str, arguments)], env={"COLUMNS": "120"})
    assert result.exit_code == code, result.output
    return result.output


def test_the_answer_has_all_parts(runs: Path) -> None:
    text = " ".join(asked(runs / "bad").split())
    assert "changed reward/mean went from" in text or "changed evaluation/rule went from" in text
    assert "cause 1 the reward pays for responses that were cut off (CutRewarded)" in text
    assert f"--set '{JOB}:algorithm.rewards.truncated=Mask'" in text
    assert "cut off:" in text
    assert "advantage" in text


def test_the_last_healthy_run_of_the_job_is_compared_with(runs: Path) -> None:
    text = " ".join(asked(runs / "bad").split())
    assert "differ from the run good" in text
    assert "spec.algorithm.rewards.missingEndPenalty: 0.0, there 1.0" in text
    assert "response_finished/mean: " in text
    assert "differ from" not in asked(runs / "good")


def test_json_has_the_same(runs: Path) -> None:
    answer = json.loads(asked(runs / "bad", "--json", "--job", JOB))[JOB]
    assert answer["causes"][0]["cause"] == "CutRewarded"
    assert answer["against"]["settings"]["spec.data.maxResponseTokens"] == ["32", "48"]
    assert len(answer["rows"]) == 20


def test_a_healthy_run_has_no_cause(runs: Path) -> None:
    text = " ".join(asked(runs / "good").split())
    assert "no cause found" in text
    assert " rows " not in text
    assert "not seen the evaluation before training is no step (evaluation/rule was 0.117)" in text


def test_only_the_first_steps_are_looked_at(runs: Path) -> None:
    text = asked(runs / "bad", "--step", 4)
    assert "4 steps" in text
    assert "no cause found" in text


def test_a_job_that_is_not_there_is_refused(runs: Path) -> None:
    assert "no job helpful-pp has made a step" in asked(runs / "bad", "--job", "helpful-pp", code=ExitCode.SPEC)


def test_the_report_says_the_same(runs: Path) -> None:
    page = write_report(runs / "bad").read_text()
    assert "<h3>Why</h3>" in page
    assert "The reward pays for responses that were cut off" in page
