"""Two attempts of a job and one run folder: the newer one has it, even while the older still runs somewhere."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_api.exit_codes import ExitCode
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run_folder import commands
from rlhf_trainer.run_folder.attempt import (
    EXIT,
    LIFE,
    SILENCE_SECONDS,
    AttemptId,
    Watch,
    WrongAttempt,
    owner,
    read_exit,
    write_exit,
)
from rlhf_trainer.run_folder.commands import save_now
from rlhf_trainer.run_folder.folder import SAVE_REQUEST, SUMMARY, JobFolder, add_to_summary
from rlhf_trainer.run_folder.lock import only_run_in
from tests.trainer.jobs import job
from tests.trainer.pods.become import Become, begin
from tests.trainer.pods.manifests import SFT

RECORD = {"step": 3, "loss/sft": 0.5, "time/step": 2.0, "tokens_per_second": 100.0}


@pytest.fixture
def folder(tmp_path: Path, attempt: Become) -> JobFolder:
    """Of attempt 1, with a step."""
    attempt(1)
    with only_run_in(tmp_path / "run"):
        begun = JobFolder(tmp_path / "run", job(tmp_path, "mine", SFT))
        begun.begin(None, inputs={})
        begun.record(RECORD, total_steps=9, stage="SFT")
    return begun


def test_a_newer_attempt_takes_the_folder_an_older_does_not(tmp_path: Path, attempt: Become) -> None:
    begin(tmp_path, attempt, 2)
    assert owner(tmp_path) == AttemptId(2)
    begin(tmp_path, attempt, 3)
    assert owner(tmp_path) == AttemptId(3)
    with pytest.raises(
        EnvironmentProblem, match="attempt 3 of this job has begun, so attempt 2 writes no more"
    ) as told:
        begin(tmp_path, attempt, 2)
    assert told.value.exit_code == ExitCode.ENVIRONMENT
    assert owner(tmp_path) == AttemptId(3)


def test_an_older_attempts_lock_is_none_and_each_runs_once(tmp_path: Path, attempt: Become) -> None:
    attempt(1)
    with only_run_in(tmp_path):
        with pytest.raises(EnvironmentProblem, match="another rlhf run"):
            begin(tmp_path, attempt, 1)
        begin(tmp_path, attempt, 2)


def test_what_belongs_to_a_newer_attempt_is_not_touched(folder: JobFolder, attempt: Become) -> None:
    begin(folder.path.parent, attempt, 2)
    attempt(1)
    before = {file: file.read_bytes() for file in folder.path.rglob("*") if file.is_file()}
    output = folder.path.parent
    writes: tuple[Callable[[], None], ...] = (
        lambda: folder.record({**RECORD, "step": 4}, total_steps=9, stage="SFT"),
        lambda: folder.event("late"),
        lambda: folder.write_held_out([{"prompt": "late"}]),
        lambda: add_to_summary(output, "mine", {"steps": 4}),
        folder.require_ours,
        folder.succeed,
        folder.clear,
        lambda: folder.begin(None, inputs={}),
    )
    for write in writes:
        with pytest.raises(EnvironmentProblem, match="attempt 2 of this job has begun"):
            write()
    folder.fail(reason="Data", exit_code=ExitCode.DATA, message="late")
    write_exit(output, 3, reason="Data", message="late")
    assert {file: file.read_bytes() for file in folder.path.rglob("*") if file.is_file()} == before
    assert not (output / EXIT).exists()
    assert not (output / SUMMARY).exists()


def test_what_an_older_attempt_writes_at_the_last_moment_is_gone(
    folder: JobFolder, attempt: Become, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had looked at the mark before that changed, and writes while the newer one waits for it."""

    def older_writes(_: float) -> None:
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4}\n')
        (folder.path / "status.json").write_text('{"attempt": 1, "phase": "Running"}')

    monkeypatch.setattr("rlhf_trainer.run_folder.lock.time.sleep", older_writes)
    attempt(2)
    with only_run_in(folder.path.parent):
        newer = JobFolder(folder.path.parent, job(tmp_path, "mine", SFT))
        newer.begin(None, inputs={})
    assert json.loads((folder.path / "status.json").read_text())["attempt"] == 2
    assert not (folder.path / "metrics.jsonl").exists()


def test_an_attempt_waits_for_no_older_one_that_has_ended(
    tmp_path: Path, attempt: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("rlhf_trainer.run_folder.lock.time.sleep", waits.append)
    begin(tmp_path, attempt, 1)
    write_exit(tmp_path, 3, reason="Data", message="gone")
    begin(tmp_path, attempt, 2)
    begin(tmp_path, attempt, 2)
    assert not waits
    begin(tmp_path, attempt, 3)
    assert waits == [1.0]


def test_a_status_says_whose_it_is_and_at_what_pace(folder: JobFolder) -> None:
    status = json.loads((folder.path / "status.json").read_text())
    progress = status["progress"]
    assert (status["attempt"], progress["stepSeconds"], progress["tokensPerSecond"]) == (1, 2.0, 100.0)
    assert progress["remainingSeconds"] == 12
    assert progress["lastStepTime"].endswith("Z")
    folder.fail(reason="Data", exit_code=ExitCode.DATA, message="gone")
    failure = json.loads((folder.path / "status.json").read_text())["lastFailure"]
    assert (failure["attempt"], failure["exitCode"], failure["time"][-1]) == (1, 3, "Z")


def test_a_succeeded_job_belongs_to_the_finding_attempt(folder: JobFolder, attempt: Become) -> None:
    folder.made.mkdir()
    folder.succeed()
    attempt(2)
    folder.adopt()
    status = json.loads((folder.path / "status.json").read_text())
    assert (status["attempt"], status["phase"], status["progress"]["step"]) == (2, "Succeeded", 3)
    assert status["output"]["uri"].endswith("/run/mine/model")


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_number_that_is_none_is_a_sentence(tmp_path: Path, attempt: Become, text: str) -> None:
    attempt(text)
    with pytest.raises(WrongAttempt, match="RLHF_ATTEMPT is"):
        begin(tmp_path, attempt, text)


def test_a_trainer_is_alive_until_it_says_otherwise_or_is_silent(tmp_path: Path, attempt: Become) -> None:
    now = 0.0
    assert not Watch(tmp_path, AttemptId(1), lambda: now).is_alive(), "none has begun"
    begin(tmp_path, attempt, 1)
    watch = Watch(tmp_path, AttemptId(1), lambda: now)
    assert watch.is_alive()
    now = SILENCE_SECONDS - 1
    (tmp_path / LIFE).write_text("1 99 another-machine")
    assert watch.is_alive()
    now = 2 * SILENCE_SECONDS - 2
    assert watch.is_alive()
    now = 2 * SILENCE_SECONDS
    assert not watch.is_alive()
    assert Watch(tmp_path, AttemptId(1), lambda: now).is_alive()
    assert not Watch(tmp_path, AttemptId(2), lambda: now).is_alive()
    write_exit(tmp_path, 0, reason="Ok", message="")
    assert not Watch(tmp_path, AttemptId(1), lambda: now).is_alive()


def test_a_pod_that_ends_waits_for_nothing_that_will_not_come(
    folder: JobFolder, attempt: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = folder.path.parent
    monkeypatch.setattr(commands, "POLL_SECONDS", 0.01)
    monkeypatch.setattr("rlhf_trainer.run_folder.attempt.SILENCE_SECONDS", 0.2)
    (output / LIFE).write_text("1 99 another-machine")
    assert "the trainer has ended; step 0 is saved" in save_now(output), "it was killed: no exit.json, no more beats"
    assert read_exit(output, AttemptId(1)) is None, "nobody here can know for sure"
    (output / SAVE_REQUEST).unlink()
    write_exit(output, 8, reason="Communication", message="lost")
    assert "no trainer of attempt 1 is active" in save_now(output)
    attempt(2)
    assert "no trainer of attempt 2 is active" in save_now(output)
    assert not (output / SAVE_REQUEST).exists()
    assert "no trainer of attempt 2 is active" in save_now(output / "nowhere")


def test_a_killed_trainer_is_found_dead_by_its_lock(folder: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    output = folder.path.parent
    monkeypatch.setattr("rlhf_trainer.run_folder.attempt.FREED_SECONDS", 0.2)
    program = (
        "from pathlib import Path; from rlhf_trainer.run_folder.lock import only_run_in; import time\n"
        f"with only_run_in(Path({str(output)!r})):\n    print('in', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "in\n"
        watch = Watch(output, AttemptId(1), lambda: 1.0)
        assert watch.is_alive()
        assert not watch.has_freed_its_lock()
        trainer.kill()
    assert watch.has_freed_its_lock()
    assert "the trainer has ended; step 0 is saved" in save_now(output)
    ended = read_exit(output, AttemptId(1))
    assert ended is not None
    assert (ended["exitCode"], ended["reason"]) == (137, "Killed")


def test_a_trainer_that_ends_while_a_pod_asks_has_the_last_word(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last checkpoint and its exit.json come between two looks."""
    output, status = folder.path.parent, folder.path / "status.json"
    saved = {**json.loads(status.read_text()), "checkpoint": {"step": 3}}

    def trainer_ends(_: float) -> None:
        status.write_text(json.dumps(saved))
        write_exit(output, 143, reason="Stopped", message="stopped by SIGTERM")

    monkeypatch.setattr("rlhf_trainer.run_folder.commands.time.sleep", trainer_ends)
    assert save_now(output).endswith("step 3 is saved")


def test_a_pod_that_ends_waits_for_what_is_not_saved(folder: JobFolder) -> None:
    status = folder.path / "status.json"
    saved = {**json.loads(status.read_text()), "checkpoint": {"step": 3}}
    program = (
        "import json, sys, time; from pathlib import Path; from rlhf_trainer.run_folder.lock import only_run_in\n"
        f"status, request = Path({str(status)!r}), Path({str(folder.save_request)!r})\n"
        f"with only_run_in(status.parent.parent):\n"
        "    print('in', flush=True)\n"
        "    while not request.exists(): time.sleep(0.01)\n"
        "    request.unlink(); time.sleep(0.5); print('saved', flush=True)\n"
        f"    status.write_text({json.dumps(saved)!r}); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "in\n"
        try:
            assert save_now(folder.path.parent).endswith("step 3 is saved")
            assert trainer.stdout.readline() == "saved\n"
            assert save_now(folder.path.parent).endswith("every step of attempt 1 is saved")
            assert not folder.save_request.exists()
        finally:
            trainer.kill()
