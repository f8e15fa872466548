"""The controller gives a call up before ranks give a collective up: only the controller sees who is to blame."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_trainer.controller.call_log import CallLog
from rlhf_trainer.run import slots


@pytest.mark.parametrize("deadline", [10.0, 1800.0])
def test_a_collective_waits_for_two_deadlines(deadline: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may begin a collective when its neighbour has just used up its own deadline elsewhere."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(slots, "WorkerGroup", lambda pool, **given: made.update(given))
    pool: Any = SimpleNamespace(name="all")
    slots.Slots._group(pool, "CPU", {}, CallLog(), deadline)
    assert made["deadline"] == deadline
    assert made["start"].args == ("CPU", 2 * deadline)
