"""An own Ray that did not start in the time that Ray gives itself is started once more; no other error is retried."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray._private import services

from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run import session
from rlhf_trainer.run.session import OwnProcess, _await_node, ray_session

SLOW = "The current node timed out during startup. This could happen because the GCS has become overloaded."


def started(*errors: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses at which Ray was started, where it fails with these errors first."""
    calls: list[str] = []
    left = list(errors)

    def init(*, address: str, **_: object) -> None:
        calls.append(address)
        if left:
            raise RuntimeError(left.pop(0))

    monkeypatch.setattr(session, "ray", SimpleNamespace(init=init, shutdown=lambda: None))
    with ray_session(None, cpu_slots=1):
        pass
    return calls


def test_a_slow_start_is_tried_once_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    half_started = SimpleNamespace(kill=lambda: killed.append(True))
    killed: list[bool] = []
    monkeypatch.setattr(OwnProcess, "started", [half_started])
    assert started(SLOW, monkeypatch=monkeypatch) == ["local", "local"]
    assert killed == [True]
    assert "Ray did not start within 30 s; it is started once more\n" in capsys.readouterr().err


def test_the_second_start_waits_longer_for_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_trainer.run.session.time.sleep", lambda _: None)
    answers = [RuntimeError("no node")] * 50

    def find(*_: object) -> str:
        if answers:
            raise answers.pop()
        return "node"

    assert _await_node(find, "address", "id") == "node"
    answers = [RuntimeError("no node")] * 500
    with pytest.raises(TimeoutError, match=r"^the machine is too busy; .* --address$"):
        _await_node(find, "address", "id")


def test_the_longer_wait_is_for_that_start_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = services.get_node
    started(SLOW, monkeypatch=monkeypatch)
    assert services.get_node is before


@pytest.mark.parametrize("errors", [(SLOW, SLOW), ("no space left",), (SLOW, "no space left")])
def test_what_fails_again_or_otherwise_is_an_error(errors: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentProblem, match=f"^Ray cannot start: {errors[-1][:11]}"):
        started(*errors, monkeypatch=monkeypatch)
