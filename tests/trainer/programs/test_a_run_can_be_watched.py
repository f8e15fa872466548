"""`rlhf top` and `rlhf logs` show what jobs do and what failed, and change nothing."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_api.exit_codes import ExitCode
from rlhf_api.status import Metric
from rlhf_planning.job_table import age, headline
from rlhf_trainer.commands.cli import app
from rlhf_trainer.run_folder.folder import JobFolder
from rlhf_trainer.run_folder.lock import only_run_in
from tests.each import each_case
from tests.trainer.report.conftest import PPO, RM, SFT, ppo_record


def rlhf(*words: object, columns: int = 80) -> str:
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder: SFT is done, RM has failed, and PPO makes steps, if somebody holds the folder's lock."""
    folder = tmp_path / "first"
    sft, rm, ppo = (JobFolder(folder, job) for job in (SFT, RM, PPO))
    for number, each in enumerate((sft, rm, ppo)):
        each.begin(None, inputs={})
        os.utime(each.path / "job.yaml", (number, number))
    (sft.path / "model").mkdir()
    sft.record({"step": 1, "loss/sft": 0.5, "time/step": 2.0, "tokens_per_second": 1234.0}, total_steps=1, stage="SFT")
    sft.succeed()
    rm.event("the lull before")
    (rm.path / "stacks.txt").write_text("=== rank 1\nthread main:\n  train.py, line 3\n")
    rm.fail(reason="Communication", exit_code=ExitCode.COMMUNICATION, message="rank 1 of pool all hangs")
    ppo.record(
        {**ppo_record(7), "reward/mean": 0.512, "time/step": 3.0, "tokens_per_second": 12345.0},
        total_steps=40,
        stage="PPO",
    )
    return folder


def rows(shown: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in shown.splitlines()[1:]}


@pytest.mark.parametrize("columns", [80, 120])
def test_top_shows_each_job_in_one_line(run: Path, columns: int) -> None:
    with only_run_in(run):
        shown = rlhf("top", run, columns=columns)
    found = rows(shown)
    assert max(map(len, shown.splitlines())) <= columns
    assert list(found) == ["helpful-sft", "helpful-rm", "helpful-ppo"]
    assert ("PPO" in found["helpful-ppo"]) == (columns == 120)
    assert found["helpful-ppo"][-8:-2] == ["Running", "7/40", "reward", "0.512", "12,345", "1m39"]
    assert {"Succeeded", "1/1", "0.5"} <= set(found["helpful-sft"])
    assert "Failed" in found["helpful-rm"]


def test_a_narrow_terminal_shows_fewer_columns_whole(run: Path) -> None:
    with only_run_in(run):
        shown = rlhf("top", run, columns=50)
    assert max(map(len, shown.splitlines())) <= 50
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown, "no cell is cut"
    assert shown.splitlines()[0].split() == ["JOB", "PHASE", "STEP", "REWARD/LOSS"]
    assert rows(shown)["helpful-ppo"][:4] == ["Running", "7/40", "reward", "0.512"]


def test_names_too_long_for_the_terminal_are_cut(run: Path) -> None:
    (run / "helpful-sft").rename(run / ("a-very-long-name-" * 4)[:60])
    with only_run_in(run):
        shown = rlhf("top", run, run)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.splitlines()[0].split() == ["JOB", "PHASE", "STEP", "REWARD/LOSS", "TOKENS/S", "LEFT", "AGE", "SAVED"]
    assert shown.count("Running    7/40") + shown.count("Running   7/40") == 2
    assert "first/a-very-long-" in shown
    assert shown.count("…") == 2


def test_in_a_terminal_the_table_follows_the_job_until_ctrl_c(run: Path) -> None:
    main, side = pty.openpty()
    command = [sys.executable, "-m", "rlhf_trainer", "top", str(run)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env=environment) as watching:
        os.close(side)
        until(main, "7/40")
        JobFolder(run, PPO).record({**ppo_record(8), "time/step": 3.0}, total_steps=40, stage="PPO")
        until(main, "8/40")
        watching.send_signal(signal.SIGINT)
        until(main, "\x1b[?1049l")  # the screen of before is back
        assert watching.wait(30) == 0
    os.close(main)


def until(terminal: int, text: str) -> None:
    """Read what a terminal shows until a text comes."""
    seen = ""
    while text not in seen:
        seen += os.read(terminal, 1 << 16).decode(errors="replace")


def test_a_run_whose_process_is_gone_has_died(run: Path) -> None:
    assert rows(rlhf("top", run))["helpful-ppo"][0] == "Died"


def test_top_finds_the_runs_below_runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    assert "no job has begun" in rlhf("top")
    (run.parent / "runs").mkdir()
    run.rename(run.parent / "runs" / "first")
    assert "helpful-ppo" in rlhf("top")


def test_logs_are_in_order_of_time_with_the_stacks_of_a_hang(run: Path) -> None:
    told = rlhf("logs", run)
    positions = [told.index(part) for part in ("the lull before", "rank 1 of pool all hangs", "train.py, line 3")]
    assert positions[0] == min(positions), "the time of the stacks is in whole seconds, perhaps the one before the hang"
    assert "hangs" not in rlhf("logs", run, "helpful-sft")


def test_followed_logs_show_what_comes_and_end_by_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-m", "rlhf_trainer", "logs", str(run), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout
        while "train.py" not in following.stdout.readline():
            pass
        JobFolder(run, PPO).event("a new line")
        assert "helpful-ppo: a new line" in following.stdout.readline()
        time.sleep(0.1)
        following.send_signal(signal.SIGINT)
        assert following.wait(30) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("top", "nothing"), "nothing: is no run folder"),
        (("logs", "nothing"), "nothing: is no run folder"),
        (("logs", "first", "helpful-pop"), "first: no job helpful-pop has begun in it: did you mean helpful-ppo?"),
    ],
    ids=str,
)
def test_a_mistake_is_a_sentence(
    run: Path, words: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stderr.startswith(f"error: {sentence}")) == (2, True), done.stderr


def test_nothing_is_changed_by_looking(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    rlhf("top", run)
    rlhf("logs", run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_damaged_files_are_no_error(run: Path) -> None:
    (run / "helpful-ppo" / "status.json").write_text('{"phase": 3}')
    (run / "helpful-rm" / "status.json").write_text("")
    (run / "helpful-sft" / "job.yaml").write_text("spec: [")
    shown = rows(rlhf("top", run, columns=120))
    assert [shown[name][1] for name in ("helpful-ppo", "helpful-rm")] == ["Damaged", "Damaged"]
    assert shown["helpful-sft"][0] == "?"


def test_a_job_that_has_said_nothing_yet_is_pending(run: Path) -> None:
    (run / "helpful-ppo" / "status.json").unlink()
    assert rows(rlhf("top", run))["helpful-ppo"][0] == "Pending"


def test_an_empty_manifest_of_a_run_is_told_in_words(run: Path) -> None:
    manifest = run / "helpful-sft" / "job.yaml"
    manifest.write_text("")
    done = CliRunner().invoke(app, ["logs", str(run)])
    assert done.stderr == f"error: {manifest}: is not as a run left it: it is empty\n"


@each_case(
    ("seconds", "text"),
    [(None, "-"), (-3.0, "0s"), (41.2, "41s"), (185.0, "3m05"), (7620.0, "2h07"), (5 * 86400 + 3 * 3600.0, "5d03")],
)
def test_a_duration_is_short(seconds: float | None, text: str) -> None:
    assert age(seconds) == text


@each_case(
    ("names", "text"),
    [
        ({"loss/value": "2", "loss/policy": "-0.25", "kl/reference": "1"}, "loss \N{MINUS SIGN}0.25"),
        ({"reward/mean": "0.5", "loss/policy": "1"}, "reward 0.5"),
        ({"kl/reference": "1"}, "-"),
        ({"reward/mean": "much"}, "-"),
    ],
    ids=str,
)
def test_one_number_says_how_a_job_is_doing(names: dict[str, str], text: str) -> None:
    assert headline([Metric(name=name, value=value) for name, value in names.items()]) == text
