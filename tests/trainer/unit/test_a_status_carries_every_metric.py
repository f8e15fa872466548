"""The status of a job has the latest value of every metric of metrics.jsonl."""

import json
from pathlib import Path

from rlhf_api.files import load
from rlhf_trainer.run_folder.folder import JobFolder
from tests.examples.test_every_example_is_right import EXAMPLES

RECORD = {"step": 3, "reward/mean": 0.5, "entropy": 1.25, "clip_fraction": 0.125, "time/step": 2.0}


def test_a_metric_is_in_the_status_whether_or_not_its_name_has_a_slash(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, next(job for job in load(EXAMPLES[0]) if job.name == "helpful-ppo"))
    folder.begin(None, inputs={})
    folder.record(RECORD, total_steps=4, stage="PPO")
    status = json.loads((folder.path / "status.json").read_text())
    shown = {metric["name"]: float(metric["value"]) for metric in status["metrics"]}
    assert shown == {name: value for name, value in RECORD.items() if name != "step"}
    assert status["progress"]["step"] == RECORD["step"], "the step is no metric"
