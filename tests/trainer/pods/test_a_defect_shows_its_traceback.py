"""In a pod nobody can say --debug: a defect has its traceback in the log, and a user's mistake is one sentence."""

import pytest

from rlhf_api.exit_codes import ExitCode
from rlhf_trainer.commands.ending import ending
from rlhf_trainer.errors import DataError, Paused, TrainerError
from tests.trainer.pods.become import Become


def raising(error: Exception) -> int:
    def work() -> None:
        raise error

    return ending(work, debug=False)[0]


@pytest.mark.parametrize("error", [ValueError("odd"), TrainerError("odd")])
def test_a_defect_has_its_traceback(
    error: Exception, attempt: Become, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(1)
    assert raising(error) == ExitCode.INTERNAL
    told = capsys.readouterr().err
    assert "in work" in told
    assert told.splitlines()[-1].endswith("odd")
    monkeypatch.delenv("RLHF_ATTEMPT")
    assert raising(error) == ExitCode.INTERNAL
    assert "Traceback" not in capsys.readouterr().err


def test_a_mistake_is_one_sentence(attempt: Become, capsys: pytest.CaptureFixture[str]) -> None:
    attempt(1)
    assert raising(DataError("no such file")) == ExitCode.DATA
    assert capsys.readouterr().err == "error: no such file\n"
    assert raising(Paused("the same command goes on")) == ExitCode.PAUSED
    assert capsys.readouterr().err == "the same command goes on\n", "a pause is no error"
