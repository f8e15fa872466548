"""Signals at bad moments, readers that leave, and commands that look for a run."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_api.problems import SpecError
from rlhf_planning.command_line import READER_GONE
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run.stopping import Stopped, StopSignals
from rlhf_trainer.run_folder.commands import save_now
from rlhf_trainer.run_folder.folder import SAVE_REQUEST
from rlhf_trainer.run_folder.lock import is_running, only_run_in
from tests.patience import PATIENCE_SECONDS


def test_a_signal_outside_of_steps_stops_at_once() -> None:
    said: list[str] = []
    before, stop = signal.getsignal(signal.SIGTERM), StopSignals(said.append)
    with stop.handled():
        with stop.finishing_the_step():
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested == signal.SIGTERM
            assert len(said) == 1
        with pytest.raises(Stopped, match="SIGTERM") as stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stopped.value.exit_code == 143
        os.kill(os.getpid(), signal.SIGTERM)  # the cleaning up goes on
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_closed_terminal_stops_like_sigterm() -> None:
    stop = StopSignals(lambda message: None)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started these tests
    try:
        with stop.handled():
            with pytest.raises(Stopped, match="stopped by SIGHUP") as stopped:
                os.kill(os.getpid(), signal.SIGHUP)
            assert stopped.value.exit_code == 143
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with stop.handled():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_is_no_error_that_others_could_catch() -> None:
    assert not issubclass(Stopped, Exception)


def test_lines_that_nobody_reads_any_more_do_not_end_a_run(tmp_path: Path) -> None:
    program = (
        "import sys; from rlhf_trainer.outputs.display import Display, LastingConsole\n"
        "display = Display(LastingConsole())\n"
        "for _ in range(2000): display.say('x' * 100)\n"
        f"open({str(tmp_path / 'done')!r}, 'w').close()"
    )
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.read(10)
    writer.stdout.close()
    assert writer.wait(timeout=PATIENCE_SECONDS) == 0
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("module", "write"), [("rlhf_trainer.commands.cli", "typer.echo"), ("rlhf_kubectl.cli", "Console().print")]
)
def test_a_command_whose_reader_left_ends_quietly(module: str, write: str) -> None:
    program = (
        f"import typer; from rich.console import Console; from {module} import app, command\n"
        "@command('an example')\n"
        "def talk() -> None:\n"
        f"    for _ in range(2000): {write}('x' * 100)\n"
        "app(['talk'])"
    )
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.read(10)
    writer.stdout.close()
    assert writer.stderr.read() == b""
    assert writer.wait(timeout=PATIENCE_SECONDS) == READER_GONE == 141


def test_a_terminal_that_was_closed_does_not_end_a_run() -> None:
    program = (
        "import fcntl, signal, sys, termios; from rlhf_planning.command_line import print_errors\n"
        "from rlhf_trainer.outputs.display import Display, LastingConsole\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})\n"
        "display = Display(LastingConsole()); display.say('here')\n"
        "signal.sigwait({signal.SIGHUP})\n"
        "display.say('nobody reads this'); print_errors(['nor this']); sys.exit(143)"
    )
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", program]
    writer = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    assert b"here" in os.read(ours, 100)
    os.close(ours)
    assert writer.wait(timeout=PATIENCE_SECONDS) == 143


def test_a_folder_is_in_use_while_a_run_holds_it(tmp_path: Path) -> None:
    assert not is_running(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert not is_running(tmp_path / "file")
    with only_run_in(tmp_path / "run"):
        assert is_running(tmp_path / "run")
        with pytest.raises(EnvironmentProblem, match="another rlhf run"), only_run_in(tmp_path / "run"):
            pytest.fail("two runs in one folder")
    assert not is_running(tmp_path / "run")


def test_save_now_needs_a_run_and_says_when_it_ended_first(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no rlhf run is using this folder"):
        save_now(tmp_path)
    run = tmp_path / "runs" / "mine"
    program = f"from pathlib import Path; from rlhf_trainer.run_folder.lock import only_run_in\n\
from time import sleep\nwith only_run_in(Path({str(run)!r})):\n    print('in', flush=True)\n\
    while not Path({str(run / SAVE_REQUEST)!r}).exists(): sleep(0.01)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with pytest.raises(EnvironmentProblem, match="ended before it made the checkpoint"):
            save_now(run)


def test_ctrl_c_while_the_command_imports_is_no_traceback(tmp_path: Path) -> None:
    module = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "typer.py").write_text(module)  # comes before the one that `rlhf` imports
    command = [str(Path(sys.executable).with_name("rlhf")), "--version"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
