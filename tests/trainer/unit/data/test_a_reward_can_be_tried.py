"""`rlhf reward` scores made-up responses to a job's own rows, without any model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_trainer.commands.cli import app
from tests.trainer.tiny import EXAMPLE_MODEL

ROWS = [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "3 + 3 =", "answer": "\\$6"}, {"prompt": "?", "answer": "$$"}]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spec: dict[str, Any] = {
        "algorithm": {"name": "GRPO"},
        "models": {
            "actor": {"uri": f"file://{EXAMPLE_MODEL}"},
            "reward": {
                "sum": [
                    {"name": "right", "reward": {"verifier": {"name": "Math"}}},
                    {"name": "brief", "weight": 0.5, "reward": {"verifier": {"name": "Length", "maximum": 4}}},
                ]
            },
        },
        "data": {"train": {"uri": "file://rows.jsonl"}, "maxPromptTokens": 64},
        "rollout": {"samplesPerPrompt": 2},
        "training": {"totalSteps": 1, "promptBatchSize": 2},
    }
    document = {"apiVersion": "rlhf.hybridflow.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "sums"}}
    (tmp_path / "job.yaml").write_text(json.dumps({**document, "spec": spec}))
    return tmp_path / "job.yaml"


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["reward", *map(str, arguments)])
    assert done.exit_code == code, done.stderr
    return done.stderr if code else done.stdout


def test_empty_right_and_given_responses_are_scored(manifest: Path) -> None:
    given = manifest.parent / "texts.jsonl"
    given.write_text('{"row": 1, "response": "It is 6."}\n{"row": 1, "response": "7"}\n')
    found = json.loads(run(manifest, f"--responses={given}", "--json"))["sums"]
    scores = [tuple(each[name] for name in ("row", "kind", "response", "right", "brief", "total")) for each in found]
    assert [each for each in scores if each[1] != "gold's turn"] == [
        (0, "empty", "", 0.0, 1.0, 0.5),
        (0, "gold", "4", 1.0, 1.0, 1.5),
        (1, "empty", "", 0.0, 1.0, 0.5),
        (1, "gold", "\\$6", 1.0, 1.0, 1.5),
        (1, "given", "It is 6.", 1.0, 0.0, 1.0),
        (1, "given", "7", 0.0, 1.0, 0.5),
    ]
    assert all(each["right"] == 1.0 for each in found if each["kind"] == "gold's turn")


def test_the_table_has_a_line_for_each_response(manifest: Path) -> None:
    text = run(manifest, "--rows=1")
    assert "holds '$$' as answer, which no right response fulfils for Math" in " ".join(text.split())
    assert next(line.split()[:2] for line in text.splitlines() if "gold" in line) == ["0", "gold"]
    assert "seconds" in text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"row": 9, "response": "4"}', "--responses: names the row 9; there are 2"),
        ('{"row": "a", "response": "4"}', "--responses: has a line unlike "),
        ("4", "--responses: has a line unlike "),
    ],
)
def test_texts_of_another_form_are_refused(line: str, told: str, manifest: Path) -> None:
    given = manifest.parent / "texts.jsonl"
    given.write_text(line + "\n")
    assert told in " ".join(run(manifest, f"--responses={given}", code=2).split())


def test_a_job_without_rewards_is_refused(manifest: Path) -> None:
    assert "--job: names no job with rewards" in run(manifest, "--job=nope", code=2)
