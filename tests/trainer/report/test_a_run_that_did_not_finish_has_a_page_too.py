"""A run that was stopped, has failed, still goes on, or lost files: the page shows what there is."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.exit_codes import ExitCode
from rlhf_api.files import load
from tests.each import each_case
from tests.trainer.report.conftest import PPO, RM, ROOT, SFT, finish, page_of, ppo_record, report, run_job, sample

Chain = Callable[[list[dict[str, Any]]], Path]


def test_a_job_that_stopped_after_three_steps(tmp_path: Path) -> None:
    finish(tmp_path, run_job(tmp_path, SFT, []), loss=0.5)
    folder = run_job(tmp_path, PPO, map(ppo_record, (1, 2, 3)))
    folder.fail(reason="Stopped", exit_code=ExitCode.SIGTERM, message="stopped by SIGTERM")
    page = page_of(tmp_path)
    assert "Stopped in helpful-ppo" in page.sections[""]
    assert page.row("helpful-ppo", "PPO")[2:4] == ["Stopped", "3 of 25"]
    assert "(exit code 143): stopped by SIGTERM" in page.sections["helpful-ppo"]
    assert "No samples yet" in page.sections["helpful-ppo"]
    assert page.row("helpful-sft", "loss")[3] == "0.5"


def test_a_failed_job_says_why_and_counts_its_warnings(tmp_path: Path) -> None:
    folder = run_job(tmp_path, PPO, map(ppo_record, (1, 2)))
    for step in (1, 2):
        folder.event(f"step {step}: generator and trainer disagree")
    folder.fail(reason="Numerics", exit_code=ExitCode.NUMERICS, message="step 3: loss/policy is not finite")
    text = page_of(tmp_path).sections["helpful-ppo"]
    assert "Numerics (exit code 6): step 3: loss/policy is not finite" in text
    assert "Warning (2 steps, 1 to 2): generator and trainer disagree" in text
    assert text.count("Warning (") == 1, "the failure is no warning"


def test_a_job_that_has_just_begun(tmp_path: Path) -> None:
    run_job(tmp_path, SFT, [])
    page = page_of(tmp_path)
    assert "Running in helpful-sft" in page.sections[""]
    assert "No step has been measured yet" in page.sections["helpful-sft"]
    assert "Nothing was measured on held-out data" in page.sections[""]
    assert "Not recorded" in page.sections["environment"]


@pytest.mark.parametrize("example", ["10-helpful-dpo", "kto-helpful"])
def test_a_job_that_generates_nothing_promises_no_samples(example: str, tmp_path: Path) -> None:
    (job,) = load(ROOT / "examples" / f"{example}.yaml", finished={SFT.name: "SFT"})
    run_job(tmp_path, job, [])
    assert "No samples yet" not in page_of(tmp_path).sections[job.name]


def test_a_single_step(tmp_path: Path) -> None:
    run_job(tmp_path, PPO, [ppo_record(1)])
    assert page_of(tmp_path).row("helpful-ppo", "PPO")[3] == "1 of 25"


def test_a_job_with_a_teacher_on_a_server(tmp_path: Path) -> None:
    server = "{name: t, url: 'http://t:8000/v1', model: m}"
    changes = [f"sums-distilled:models.{each}" for each in ("teacher=", f"teacherEndpoints=[{server}]")]
    changes.append("sums-distilled:algorithm.topK=4")
    jobs = {job.name: job for job in load(ROOT / "examples" / "20-distillation.yaml", changes)}
    run_job(tmp_path, jobs["sums-distilled"], [ppo_record(1)])
    assert "http://t:8000/v1" in page_of(tmp_path).sections["sums-distilled"]


def test_updates_that_were_skipped_are_seen(tmp_path: Path) -> None:
    records = [{**ppo_record(n), "skipped_updates": float(n in (4, 5))} for n in range(1, 10)]
    del records[3]["loss/policy"]  # it was not finite
    run_job(tmp_path, PPO, records)
    assert (
        "Updates that were skipped because loss or gradient was not finite" in page_of(tmp_path).sections["helpful-ppo"]
    )


def test_the_last_record_of_a_step_that_ran_twice_counts(tmp_path: Path) -> None:
    again = [{**ppo_record(n), "reward/mean": 9.0 + n} for n in (2, 3)]
    run_job(tmp_path, PPO, [*map(ppo_record, (1, 2, 3)), *again])
    page = page_of(tmp_path)
    assert page.row("helpful-ppo", "PPO")[3] == "3 of 25"
    assert "1.1 → 12" in page.sections["helpful-ppo"]


@each_case(
    ("file", "torn", "sentence"),
    [
        ("metrics.jsonl", '{"step": 26, "rew', "metrics.jsonl: 1 of 26 lines cannot be read"),
        ("samples.jsonl", '{"prompt": "Ho', "samples.jsonl: 1 of 3 lines cannot be read"),
        ("status.json", '{"phase": "Runn', "status.json cannot be read"),
        ("job.yaml", "spec: [", "job.yaml cannot be read"),
    ],
)
def test_a_torn_file_is_named_and_the_rest_is_shown(chain: Chain, file: str, torn: str, sentence: str) -> None:
    folder = chain([sample(1), sample(2)])
    path = folder / "helpful-ppo" / file
    path.write_text((path.read_text() if file.endswith("l") and file != "job.yaml" else "") + torn)
    text = page_of(folder).sections["helpful-ppo"]
    assert sentence in text
    assert "reward/mean" in text


NO_SCORES = "\n".join(json.dumps({**sample(number), "reward_before": math.nan}) for number in (1, 2))
NAMELESS = {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": [1, None]}}
WORK = {"name": "update", "ph": "X", "cat": "update", "pid": 1, "tid": 0, "ts": 0, "dur": 1, "args": {"step": 1}}
NO_NAME = json.dumps({"traceEvents": [NAMELESS, WORK]})


@each_case(
    ("file", "text", "sentence"),
    [
        ("job.yaml", "spec: {models: {actor: {optimizer: {learningRate: fast}}}}", "job.yaml cannot be read"),
        ("job.yaml", "", "job.yaml cannot be read"),
        ("metrics.jsonl", '{"step": "one"}\n{"step": NaN}\n', ""),
        ("samples.jsonl", NO_SCORES, ""),
        ("trace.json", NO_NAME, ""),
        ("../summary.json", '{"helpful-ppo": [1]}', ""),
    ],
)
def test_values_of_wrong_types_are_left_out(chain: Chain, file: str, text: str, sentence: str) -> None:
    folder = chain([sample(1)])
    (folder / "helpful-ppo" / file).write_text(text)
    assert sentence in page_of(folder).sections["helpful-ppo"]


@pytest.mark.parametrize("huge", [str(10**400), "Infinity", "1e400"])
def test_a_number_beyond_all_floats_is_infinite(chain: Chain, huge: str) -> None:
    folder = chain([sample(1)])
    with (folder / "helpful-ppo" / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 26, "time/step": {huge}, "reward/mean": {huge}}}\n')
    (folder / "summary.json").write_text(f'{{"helpful-ppo": {{"reward_after": {huge}, "seconds": {huge}}}}}')
    assert "inf" in page_of(folder).sections["helpful-ppo"]


@each_case("file", ["metrics.jsonl", "samples.jsonl", "status.json", "events.log"])
def test_a_missing_file_leaves_a_page_without_it(chain: Chain, file: str) -> None:
    folder = chain([sample(1)])
    (folder / "helpful-ppo" / file).unlink()
    assert "helpful-ppo" in page_of(folder).sections


def test_jobs_come_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    for job, began in ((PPO, "2026-01-01T00:00:03Z"), (SFT, "2026-01-01T00:00:01Z"), (RM, "2026-01-01T00:00:02Z")):
        folder = run_job(tmp_path, job, []).path
        status = json.loads((folder / "status.json").read_text())
        (folder / "status.json").write_text(json.dumps({**status, "startTime": began}))
    names = [name for name in page_of(tmp_path).sections if name.startswith("helpful")]
    assert names == ["helpful-sft", "helpful-rm", "helpful-ppo"]


def test_a_job_file_that_names_its_own_job_has_a_page(tmp_path: Path) -> None:
    file = run_job(tmp_path, PPO, []).path / "job.yaml"
    file.write_text(file.read_text().replace("job://helpful-rm", "job://helpful-ppo"))
    assert "helpful-ppo" in page_of(tmp_path).sections


def test_a_folder_that_is_no_run_folder_is_a_mistake_of_usage(tmp_path: Path) -> None:
    for folder, sentence in (
        (tmp_path, "it holds no <job>/job.yaml"),
        (tmp_path / "nowhere", "there is no such folder"),
    ):
        done = report(folder)
        assert done.exit_code == ExitCode.SPEC
        assert done.stderr.startswith(f"error: {folder}: is no run folder: {sentence}")
        assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_page_that_cannot_be_written_is_the_environments(chain: Chain) -> None:
    folder = chain([sample(1)])
    (folder / "report.html").mkdir()
    done = report(folder)
    assert done.exit_code == ExitCode.ENVIRONMENT
    assert done.stderr == f"error: {folder / 'report.html'}: Is a directory\n"
    shutil.rmtree(folder / "report.html")
