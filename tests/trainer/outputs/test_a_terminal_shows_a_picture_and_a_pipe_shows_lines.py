"""What people see: a live picture in a terminal, the same lines as ever elsewhere."""

import io
import math
import os
import pty
import sys
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from rich.console import Console

from rlhf_api.job import Job
from rlhf_trainer.errors import NumericsError
from rlhf_trainer.outputs.display import POINTS, Display, LiveDisplay, display_for, points_of, sparkline
from rlhf_trainer.run.publisher import Publisher
from tests.trainer.outputs.conftest import step_report

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


@pytest.fixture
def terminal() -> Console:
    """A terminal of 100 columns that remembers what was written to it."""
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=30, highlight=False, color_system=None)


def written(console: Console) -> str:
    """Everything written to a console so far."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def picture(live: LiveDisplay) -> list[str]:
    """The lines of the picture as it is now."""
    console = Console(file=io.StringIO(), width=100)
    console.print(live)
    return [line.rstrip() for line in written(console).splitlines()]


def test_a_pipe_gets_a_line_a_step(
    sft: Job, publisher_with: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), highlight=False)
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    display = Display(console)
    publisher = publisher_with(display)
    with display.showing([sft]), publisher.recording_the_end():
        publisher.begin(first_step=3, total_steps=150)
        now += 14.0
        publisher.step(step_report(4, "kl is [off]", loss__sft=6.4181, tokens_per_second=3006.4, time__step=1.0))
    assert written(console) == (
        "warning: tiny-sft step 4: kl is [off]\n"
        "tiny-sft          4/150  loss 6.418  tokens/s 3,006  left 17:02\n"  # 7 s a step, 146 to go
    )


def test_colors_asked_for_do_not_make_a_pipe_a_terminal(sft: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert type(display_for([sft])) is Display


@pytest.mark.parametrize(("kind", "expected"), [("xterm-256color", LiveDisplay), ("dumb", Display)])
def test_a_terminal_gets_the_picture_unless_it_is_dumb(
    sft: Job, monkeypatch: pytest.MonkeyPatch, kind: str, expected: type[Display]
) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", kind)
    with open(theirs, "w") as stdout:  # noqa: PTH123 a descriptor has no path
        monkeypatch.setattr(sys, "stdout", stdout)
        assert type(display_for([sft])) is expected
    os.close(ours)


def test_the_picture_shows_chain_bar_course_and_time(
    sft: Job, publisher_with: Callable[..., Publisher], terminal: Console
) -> None:
    earlier, later = (
        sft.model_copy(update={"metadata": sft.metadata.model_copy(update={"name": name})})
        for name in ("tiny-base", "tiny-ppo")
    )
    live = LiveDisplay(terminal, [earlier, sft, later])
    publisher = publisher_with(live)
    with live.showing([sft, later]):
        assert [line.split()[2] for line in picture(live)] == ["done", "starting", "waiting"]
        publisher.begin(first_step=1, total_steps=4)
        publisher.step(step_report(1, loss__sft=4.0, tokens_per_second=10, time__step=4, time__update=3, time__data=1))
        publisher.step(step_report(2, loss__sft=2.0, tokens_per_second=20, time__step=4, time__update=3, time__data=1))
        done, running, waiting, _, loss, tokens, phases = picture(live)
        assert (done.split()[2], waiting.split()[2]) == ("done", "waiting")
        assert running.split()[:3] == ["tiny-sft", "SFT", "running"]
        assert "2/4  " in running
        assert running.split()[-2] == "left"
        assert loss.split() == ["loss", "2.000", "▇▁", "2.000", "to", "4.000"]
        assert tokens.split() == ["tokens/s", "20", "▁▇", "10", "to", "20"]
        assert phases.split()[-4:] == ["update", "75%", "data", "25%"]
        assert max(map(len, picture(live))) <= 100
        publisher.step(step_report(4, loss__sft=2.0))
        assert "finishing" in picture(live)[1]
    assert written(terminal).count(SHOW_CURSOR) == 1


def test_what_is_said_stands_above_the_picture(
    sft: Job, publisher_with: Callable[..., Publisher], terminal: Console
) -> None:
    live = LiveDisplay(terminal, [sft])
    publisher = publisher_with(live)
    with live.showing([sft]), publisher.recording_the_end():
        publisher.say("dropped 3 rows [overlong]")
        publisher.begin(first_step=1, total_steps=4)
        publisher.step(step_report(1, "odd", loss__sft=4.0))
    text = written(terminal)
    said, warned, last = map(text.rindex, ("dropped 3 rows [overlong]", "warning: tiny-sft step 1: odd", "done"))
    assert said < warned < last


@pytest.mark.parametrize(("error", "state"), [(NumericsError("nan"), "failed"), (KeyboardInterrupt(), "stopped")])
def test_an_error_leaves_the_terminal_as_it_was(
    sft: Job, publisher_with: Callable[..., Publisher], terminal: Console, error: BaseException, state: str
) -> None:
    stdout, live = sys.stdout, LiveDisplay(terminal, [sft])
    publisher = publisher_with(live)

    def run() -> None:
        with live.showing([sft]), publisher.recording_the_end():
            publisher.begin(first_step=1, total_steps=4)
            raise error

    with pytest.raises(type(error)):
        run()
    text = written(terminal)
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    assert state in text[text.rindex("tiny-sft") :]
    assert sys.stdout is stdout


def test_a_course_keeps_the_whole_run_in_few_points() -> None:
    points = points_of(list(map(float, range(POINTS * 256))))
    assert len(points) == POINTS
    gaps = {later - earlier for earlier, later in pairwise(points)}
    assert gaps == {256.0}, "each point is the mean of equally many steps"
    assert points[0] == sum(range(256)) / 256


def test_a_short_course_loses_nothing() -> None:
    values = list(map(float, range(POINTS)))
    assert points_of(values) == values


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0.0, 6.0, 3.0, math.nan, 1.0]) == "▁▇▄ ▂"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
