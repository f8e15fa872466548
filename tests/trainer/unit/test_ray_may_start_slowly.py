"""An own Ray may take minutes to start on a busy machine, not the half minute that Ray gives itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray._private import services

from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run import session
from rlhf_trainer.run.session import OwnProcess, ray_session


def started(failures: int, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Start a Ray whose node is known after so many failed questions; return what `ray.init` got to know."""
    left, found = [RuntimeError("no node")] * failures, list[object]()

    def find(*_: object) -> str:
        if left:
            raise left.pop()
        return "node"

    monkeypatch.setattr(services, "get_node", find)
    monkeypatch.setattr(session, "time", SimpleNamespace(sleep=lambda _: None))
    ray = SimpleNamespace(init=lambda **_: found.append(services.get_node("address", "id")), shutdown=lambda: None)
    monkeypatch.setattr(session, "ray", ray)
    with ray_session(None, cpu_slots=1):
        assert services.get_node is find, "it is for the start alone"
    return found


def test_a_slow_start_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(100, monkeypatch) == ["node"]


def test_a_start_without_an_end_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentProblem, match=r"^Ray cannot start: the machine is too busy; .* --address$"):
        started(500, monkeypatch)


def test_a_process_that_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        OwnProcess(["/bin/false"], preexec_fn=lambda: None).wait()
        services.get_node("address", "id")

    def find(*_: object) -> None:
        raise RuntimeError("no node")

    monkeypatch.setattr(services, "get_node", find)
    monkeypatch.setattr(session, "ray", SimpleNamespace(init=init))
    with (
        pytest.raises(EnvironmentProblem, match=r"^Ray cannot start: its false ended with code 1$"),
        ray_session(None, cpu_slots=1),
    ):
        pass


def test_what_fails_otherwise_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise RuntimeError("no space left")

    monkeypatch.setattr(session, "ray", SimpleNamespace(init=init))
    with pytest.raises(EnvironmentProblem, match=r"^Ray cannot start: no space left$"), ray_session(None, cpu_slots=1):
        pass
