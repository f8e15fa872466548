"""An RLHFJob is deleted and made again on the claim of the old one: attempts begin with 1 again."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_api.exit_codes import ExitCode
from rlhf_trainer.commands.cli import app
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.pods.sidecar import answer
from rlhf_trainer.run_folder.attempt import AttemptId, Watch, owner, read_exit, write_exit
from rlhf_trainer.run_folder.commands import save_now
from rlhf_trainer.run_folder.folder import JobFolder
from rlhf_trainer.run_folder.lock import only_run_in
from tests.trainer.jobs import job
from tests.trainer.pods.become import Become, begin
from tests.trainer.pods.manifests import SFT

NEW = AttemptId(1, "new")
RECORD = {"step": 3, "loss/sft": 0.5}


@pytest.fixture
def old(tmp_path: Path, attempt: Become) -> JobFolder:
    """What attempt 1 of the old job left after a step; this process still belongs to it."""
    attempt(1, "old")
    with only_run_in(tmp_path / "run"):
        left = JobFolder(tmp_path / "run", job(tmp_path, "mine", SFT))
        left.begin(None, inputs={})
        left.record(RECORD, total_steps=9, stage="SFT")
    return left


def told(folder: JobFolder) -> dict[str, Any]:
    """What the side-car of the new job tells the operator."""
    return answer(folder.path, NEW)


def nothing() -> dict[str, Any]:
    return {"attempt": 1, "jobUid": "new", "status": {}, "complete": False, "exitCode": None}


def test_how_the_old_job_failed_is_not_told_of_the_new_one(old: JobFolder, attempt: Become) -> None:
    output = old.path.parent
    old.fail(reason="UserCode", exit_code=ExitCode.USER_CODE, message="old")
    write_exit(output, 7, reason="UserCode", message="old")
    assert answer(old.path, AttemptId(1, "old"))["exitCode"] == 7
    assert told(old) == nothing()
    begin(output, attempt, 1, "new")
    assert told(old) == nothing(), "it has begun, and has written no status yet"
    new = JobFolder(output, job(output.parent, "mine", SFT))
    new.begin(None, inputs={})
    assert (told(new)["status"]["phase"], told(new)["status"].get("progress")) == ("Running", None)
    write_exit(output, 0, reason="Ok", message="")
    assert (told(new)["complete"], told(new)["exitCode"]) == (True, 0)
    assert answer(old.path, AttemptId(1, "old"))["status"] == {}


def test_a_new_job_that_cannot_begin_has_its_own_words(old: JobFolder, attempt: Become) -> None:
    output = old.path.parent
    old.fail(reason="UserCode", exit_code=ExitCode.USER_CODE, message="old")
    write_exit(output, 7, reason="UserCode", message="old")
    attempt(1, "new")
    write_exit(output, 2, reason="Spec", message="new")
    failure = told(old)["status"]["lastFailure"]
    assert (told(old)["exitCode"], failure["exitCode"], failure["message"]) == (2, 2, "new")


@pytest.mark.usefixtures("handlers")
def test_what_the_old_job_finished_is_adopted_and_then_told(old: JobFolder, attempt: Become) -> None:
    output = old.path.parent
    old.made.mkdir()
    old.succeed()
    write_exit(output, 0, reason="Ok", message="")
    assert told(old) == nothing()
    attempt(1, "new")
    manifest = output.parent / "mine.yaml"
    done = CliRunner().invoke(app, ["run", str(manifest), f"--output={output}", "--address=nobody-connects"])
    assert done.exit_code == 0, done.output
    assert "mine: already finished" in " ".join(done.output.split())
    found = told(old)
    assert (found["complete"], found["exitCode"], found["status"]["phase"]) == (True, 0, "Succeeded")
    assert found["status"]["attempt"] == 1


def test_the_numbers_of_the_old_job_do_not_count(old: JobFolder, attempt: Become) -> None:
    output = old.path.parent
    begin(output, attempt, 4, "old")
    begin(output, attempt, 1, "new")
    assert owner(output) == NEW
    begin(output, attempt, 2, "new")
    with pytest.raises(EnvironmentProblem, match="attempt 2 of this job has begun, so attempt 1 writes no more"):
        begin(output, attempt, 1, "new")


def test_a_pod_of_the_old_job_writes_no_more(old: JobFolder, attempt: Become) -> None:
    output = old.path.parent
    begin(output, attempt, 1, "new")
    write_exit(output, 0, reason="Ok", message="")
    attempt(1, "old")
    with pytest.raises(EnvironmentProblem, match="attempt 1 of a newer job of this name has begun"):
        old.record({**RECORD, "step": 4}, total_steps=9, stage="SFT")
    old.fail(reason="Data", exit_code=ExitCode.DATA, message="late")
    write_exit(output, 4, reason="Environment", message="late")
    ended = read_exit(output, NEW)
    assert ended is not None
    assert ended["exitCode"] == 0
    with pytest.raises(EnvironmentProblem, match="newer job"):
        begin(output, attempt, 5, "old")
    assert owner(output) == NEW


def test_the_lock_of_the_old_job_is_none(old: JobFolder, attempt: Become) -> None:
    output = old.path.parent
    attempt(1, "old")
    with only_run_in(output):
        begin(output, attempt, 1, "new")
        with only_run_in(output), pytest.raises(EnvironmentProblem, match="another rlhf run"):
            begin(output, attempt, 1, "new")


def test_a_pod_of_the_new_job_waits_for_no_step_of_the_old_one(old: JobFolder, attempt: Become) -> None:
    output = old.path.parent
    assert "progress" in json.loads((old.path / "status.json").read_text())
    attempt(1, "new")
    assert not Watch(output, NEW).is_alive()
    with only_run_in(output):
        assert Watch(output, NEW).is_alive()
        assert "every step of attempt 1 is saved" in save_now(output)
    assert not old.save_request.exists()
