"""The status of a job has the latest value of every metric of metrics.jsonl, and what its steps take."""

import json
from pathlib import Path

from rlhf_api.exit_codes import ExitCode
from rlhf_api.files import load
from rlhf_api.status import Status
from rlhf_trainer.run_folder.folder import JobFolder
from rlhf_trainer.run_folder.pace import MAX_STEPS, Steps
from tests.examples.test_every_example_is_right import EXAMPLES

RECORD = {"step": 3, "reward/mean": 0.5, "entropy": 1.25, "clip_fraction": 0.125, "time/step": 2.0}


def test_a_metric_is_in_the_status_with_or_without_slash(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, next(job for job in load(EXAMPLES[0]) if job.name == "helpful-ppo"))
    folder.begin(None, inputs={})
    folder.record(RECORD, total_steps=4, stage="PPO")
    status = json.loads((folder.path / "status.json").read_text())
    shown = {metric["name"]: float(metric["value"]) for metric in status["metrics"]}
    assert shown == {name: value for name, value in RECORD.items() if name != "step"}
    assert status["progress"]["step"] == RECORD["step"], "the step is no metric"


def steps(*seconds: float) -> list[dict[str, float]]:
    lengths = {"response_length/mean": 20.0, "time/transfer": 1.0}
    return [{"step": n, "time/step": each, "time/update": each / 2, **lengths} for n, each in enumerate(seconds, 1)]


def test_a_steps_seconds_are_the_median_of_the_latest() -> None:
    taken = Steps()
    first = [taken.pace(record) for record in steps(90.0, 80.0, 4.0, 1.0, 2.0, 70.0, 3.0)]
    assert first[:-1] == [None] * 6
    pace = first[-1]
    assert pace
    assert (pace.step_seconds, pace.response_tokens) == (3.0, 20.0)
    assert [(each.phase, each.seconds) for each in pace.phases] == [("update", 1.5)]
    later = [taken.pace(record) for record in steps(*[6.0] * MAX_STEPS)][-1]
    assert later
    assert later.step_seconds == 6.0


def test_the_status_tells_what_steps_take(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, next(job for job in load(EXAMPLES[0]) if job.name == "helpful-ppo"))
    folder.begin(None, inputs={})
    for record in steps(*[2.0] * 7):
        folder.record(record, total_steps=9, stage="PPO")
    status = json.loads((folder.path / "status.json").read_text())
    expected = {"stepSeconds": 2.0, "responseTokens": 20.0, "phases": [{"phase": "update", "seconds": 1.0}]}
    assert status["progress"]["pace"] == expected


def test_texts_of_users_are_bounded_in_the_status(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, next(job for job in load(EXAMPLES[0]) if job.name == "helpful-ppo"))
    folder.begin(None, inputs={})
    folder.warn("\udc80" + "x" * 10**6)
    folder.fail(reason="UserCode", exit_code=ExitCode.USER_CODE, message="y" * 10**6 + "\udc80")
    text = (folder.path / "status.json").read_text()
    status = Status.model_validate_json(text, by_alias=True, by_name=False)
    assert len(text) < 10_000
    assert status.warnings[0].startswith("\\udc80xx")
    assert len((folder.path / "events.log").read_text()) < 10_000
