"""`rlhf reward` scores made-up responses to a job's own rows, without any model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_api.spec.judges import Judge, RewardJudge
from rlhf_trainer.commands.cli import app
from rlhf_trainer.rewards.judge import JudgeClient
from rlhf_trainer.rewards.sample import Sample
from rlhf_trainer.rewards.verifiers import right_responses
from rlhf_trainer.workers import expectations
from rlhf_trainer.workers.scoring import code_of
from rlhf_trainer.workers.trials import total_of, try_score
from tests.trainer.tiny import EXAMPLE_MODEL

ROWS = [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "?", "answer": "$$"}, {"prompt": "3 + 3 =", "answer": "\\$6"}]


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
    given.write_text('{"row": 2, "response": "It is\u20286."}\n{"row": 2, "response": "7"}\n')  # no end of a line
    found = json.loads(run(manifest, f"--responses={given}", "--json"))["sums"]
    scores = [tuple(each[name] for name in ("row", "kind", "response", "right", "brief", "total")) for each in found]
    assert [each for each in scores if each[1] != "gold's turn"] == [
        (0, "empty", "", 0.0, 1.0, 0.5),
        (0, "gold", "4", 1.0, 1.0, 1.5),
        (2, "empty", "", 0.0, 1.0, 0.5),
        (2, "gold", "\\$6", 1.0, 1.0, 1.5),
        (2, "given", "It is\u20286.", 1.0, 0.0, 1.0),
        (2, "given", "7", 0.0, 1.0, 0.5),
    ]
    assert all(each["right"] == 1.0 for each in found if each["kind"] == "gold's turn")


def test_a_solution_in_a_list_as_json_text_is_right(manifest: Path) -> None:
    right = "def add(a, b):\n    return a + b\n"
    row = {"prompt": "?", "tests": "assert add(2, 3) == 5", "solutions": json.dumps([right, "pass"])}
    (manifest.parent / "rows.jsonl").write_text(json.dumps(row) + "\n")
    reward = {"verifier": {"name": "Code", "solutionKey": "solutions"}}
    (_, gold, _) = json.loads(run(manifest, f"--set=sums:models.reward={json.dumps(reward)}", "--json"))["sums"]
    assert (gold["kind"], gold["response"], gold["total"]) == ("gold", right, 1.0)


def test_the_right_answer_may_be_zero(manifest: Path) -> None:
    (manifest.parent / "rows.jsonl").write_text(json.dumps({"prompt": "1-1=", "answer": 0}) + "\n")
    trials = json.loads(run(manifest, "--json"))["sums"]
    assert [(each["kind"], each["response"]) for each in trials][:2] == [("empty", ""), ("gold", "0")]


def test_a_job_without_terms_has_its_environments_reward_alone() -> None:
    assert total_of({}, {}) == 0.0


def test_the_table_has_a_line_for_each_response(manifest: Path) -> None:
    text = run(manifest, "--rows=2")
    assert "holds '$$' as answer, which no right response fulfils for Math" in " ".join(text.split())
    assert next(line.split()[:2] for line in text.splitlines() if "gold" in line) == ["0", "gold"]
    assert "seconds" in text


def test_no_more_rows_are_verified_than_are_shown(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = [{"prompt": "?", "answer": "\\$7"}] * 50
    (manifest.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, *more]))
    tried = list[object]()

    def noted(*given: Any) -> list[str]:
        tried.append(given)
        return right_responses(*given)

    monkeypatch.setattr(expectations, "right_responses", noted)
    assert {each["row"] for each in json.loads(run(manifest, "--rows=2", "--json"))["sums"]} == {0}
    assert len(tried) == 1, "the plain number of row 0 is not tried"


def test_one_process_plays_all_episodes(manifest: Path) -> None:
    environment = {"entrypoint": "tests.trainer.environments.user_environments:Forked"}
    sets = (f"--set=sums:rollout.environment={json.dumps(environment)}", "--rows=1", "--json")
    found = json.loads(run(manifest, *sets))["sums"]
    assert len({each["environment"] for each in found}) == 1
    assert found[0]["total"] == pytest.approx(0.5 + found[0]["environment"])


def test_a_comparing_judge_gets_the_other_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge.model_validate({"url": "http://x/v1", "model": "m", "prompt": "{response_a} or {response_b}?"})
    client = code_of(RewardJudge(judge=judge), ranks=1, deadline=9.0, path="x")
    monkeypatch.setattr(
        JudgeClient, "answers", lambda _, asked, __: [float("right or" in str(each)) for each, _ in asked]
    )
    rows = enumerate(("right", "wrong"))
    samples = [Sample(step=None, row=row, prompt="?", response=each, finished=True) for row, each in rows]
    assert [try_score(client, each, samples) for each in samples] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"row": 9, "response": "4"}', "--responses: names the row 9, which is bad or missing in sums"),
        ('{"row": 1, "response": "4"}', "--responses: names the row 1, which is bad or missing in sums"),
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
