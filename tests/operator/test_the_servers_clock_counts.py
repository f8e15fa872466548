"""The operator's time is the API server's, whatever this machine's clock says."""

import time
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest

from rlhf_operator.cluster import raw
from rlhf_operator.times import ServerClock, parsed
from tests.each import each_case

SERVER = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)


class Machine:
    """Its clocks, moved by hand; `ahead` is by how much its time of day is wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
        self.passed, self.ahead = 0.0, ahead
        monkeypatch.setattr(time, "monotonic", lambda: 1000.0 + self.passed)
        monkeypatch.setattr(time, "time", lambda: SERVER.timestamp() + self.passed + self.ahead)

    def answer(self, clock: ServerClock, took: float = 0.0) -> None:
        """The server stamps an answer, which arrives so many seconds later."""
        asked, date = time.monotonic(), datetime.fromtimestamp(SERVER.timestamp() + self.passed, UTC)
        self.passed += took
        clock.observe(format_datetime(date.replace(microsecond=0), usegmt=True), asked)

    def error(self, clock: ServerClock) -> float:
        return clock.now().timestamp() - SERVER.timestamp() - self.passed


@pytest.mark.parametrize("ahead", [-600.0, 0.0, 0.4, 600.0])
def test_a_wrong_clock_is_set_right_by_the_first_answer(monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    machine = Machine(monkeypatch, ahead)
    clock = ServerClock()
    for _ in range(20):
        machine.answer(clock, took=0.01)
        assert abs(machine.error(clock)) <= 1.0
        machine.passed += 0.3


def test_a_clock_that_is_set_while_it_runs_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 0.0)
    clock = ServerClock()
    machine.answer(clock)
    before = machine.error(clock)
    machine.ahead = 3600.0
    machine.passed += 60.0
    assert machine.error(clock) == before


def test_an_answer_that_took_long_does_not_set_the_clock_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 0.0)
    clock = ServerClock()
    machine.answer(clock)
    before = machine.error(clock)
    machine.answer(clock, took=18.0)
    assert machine.error(clock) == before


@pytest.mark.parametrize("date", [None, "", "tomorrow", "Thu, 99 May 2026 12:00:00 GMT"])
def test_an_answer_without_a_date_says_nothing(monkeypatch: pytest.MonkeyPatch, date: str | None) -> None:
    machine = Machine(monkeypatch, 0.0)
    clock = ServerClock()
    clock.observe(date, time.monotonic())
    assert machine.error(clock) == 0


@each_case(
    "text",
    ["9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "2026-13-01T00:00:00Z", "2026-11-30T00:00:00", "soon", None],
)
def test_a_time_without_a_zone_or_room_for_a_span_is_none(text: str | None) -> None:
    assert parsed(text) is None


def test_an_object_of_the_year_9999_has_no_time() -> None:
    assert raw.time({"at": "9999-12-31T23:59:59Z"}, "at") is None
