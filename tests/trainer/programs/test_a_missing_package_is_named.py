"""A package of others that is not installed is the environment's fault; one of ours is a defect."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_api.exit_codes import ExitCode
from rlhf_trainer.commands.ending import ending
from rlhf_trainer.run_folder.attempt import AttemptId, read_exit
from tests.examples.test_every_example_is_right import EXAMPLES
from tests.trainer.jobs import job
from tests.trainer.pods.manifests import SFT

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from rlhf_trainer.commands.cli import main; main()"


def test_a_run_without_torch_says_so_in_one_sentence(tmp_path: Path) -> None:
    job(tmp_path, "mine", SFT)
    output = tmp_path / "run"
    output.mkdir()
    command = [sys.executable, "-c", WITHOUT_TORCH, "run", str(tmp_path / "mine.yaml"), f"--output={output}"]
    environment = {**os.environ, "RLHF_ATTEMPT": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    sentence = "the Python package torch is not installed"
    assert (ended.returncode, ended.stderr) == (ExitCode.ENVIRONMENT, f"error: {sentence}\n")
    left = read_exit(output, AttemptId(1))
    assert left is not None
    assert (left["exitCode"], left["reason"], left["message"]) == (4, "Environment", sentence)


@pytest.mark.parametrize("error", [ModuleNotFoundError("gone", name="rlhf_mapper.gone"), ModuleNotFoundError("odd")])
def test_a_module_of_ours_that_is_missing_is_a_defect(error: ModuleNotFoundError) -> None:
    def work() -> None:
        raise error

    assert ending(work, debug=False)[0] == ExitCode.INTERNAL


def test_a_full_disk_under_what_is_printed_is_no_defect() -> None:
    def work() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert ending(work, debug=False) == (ExitCode.ENVIRONMENT, "what is printed: No space left on device")


def test_a_graph_without_torch_says_what_is_missing() -> None:
    program = f"import sys; sys.modules['torch'] = None; sys.argv = ['rlhf', 'plan', {str(EXAMPLES[0])!r}, '--graph']; "
    command = [sys.executable, "-c", f"{program}from rlhf_trainer.commands.cli import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr == "error: the Python package torch is not installed\n"


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    words = ["rlhf", "plan", str(EXAMPLES[0]), "helpful-ppo", "--svg", str(tmp_path / "x.svg")]
    program = f"import sys; sys.modules['matplotlib'] = None; sys.argv = {words!r}; "
    command = [sys.executable, "-c", f"{program}from rlhf_trainer.commands.cli import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    sentence = "the Python package matplotlib is not installed; it is in rlhf-operator[plots]"
    assert done.stderr == f"error: {sentence}\n"
    assert not (tmp_path / "x.svg").exists()
