"""The trace file: valid after every step, bounded, with the ranks of each pool apart."""

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhf_trainer.outputs.display import Display
from rlhf_trainer.outputs.opening import OutputOptions, open_listeners
from rlhf_trainer.run.publisher import Publisher
from tests.trainer.outputs.conftest import step_report


def events(path: Path) -> list[dict[str, Any]]:
    """The complete events of a trace file, each with the name of its process."""
    found = json.loads(path.read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    return [{**event, "process": processes[event["pid"]]} for event in found if event["ph"] == "X"]


def test_ranks_of_different_pools_and_the_controller_are_apart(
    publisher_with: Callable[..., Publisher], tmp_path: Path
) -> None:
    with open_listeners(OutputOptions(trace=True), tmp_path / "run", print) as outputs:
        publisher = publisher_with(Display(Console(file=StringIO())), outputs)
        publisher.begin(first_step=1, total_steps=2)
        publisher.step(step_report(1))
    found = {(event["process"], event["name"]): event for event in events(tmp_path / "run/tiny-sft/trace.json")}
    assert set(found) == {
        ("controller", "step 1"),
        ("pool left", "actor.update: fetch"),
        ("pool left", "actor.update"),
        ("pool right", "reward.score"),
    }
    update = found["pool left", "actor.update"]
    assert (update["cat"], update["ts"], update["dur"], update["args"]) == ("update", 0.2e6, 0.7e6, {"step": 1})
    assert found["pool left", "actor.update: fetch"]["cat"] == "transfer"


def test_the_file_is_whole_after_every_step_and_stays_small(
    publisher_with: Callable[..., Publisher], tmp_path: Path
) -> None:
    path = tmp_path / "run" / "tiny-sft" / "trace.json"
    with open_listeners(OutputOptions(trace=True), tmp_path / "run", print) as outputs:
        publisher = publisher_with(Display(Console(file=StringIO())), outputs)
        publisher.begin(first_step=1, total_steps=100)
        for number in range(1, 41):
            publisher.step(step_report(number))
            steps = [event["args"]["step"] for event in events(path) if event["process"] == "controller"]
            assert steps[-1] == number
            assert len(steps) == min(number, 25)
    assert steps == [*range(1, 6), *range(21, 41)]


def test_a_run_that_was_not_asked_for_more_keeps_its_first_steps(
    publisher_with: Callable[..., Publisher], tmp_path: Path
) -> None:
    with open_listeners(OutputOptions(), tmp_path / "run", print) as outputs:
        publisher = publisher_with(Display(Console(file=StringIO())), outputs)
        publisher.begin(first_step=1, total_steps=100)
        for number in range(1, 41):
            publisher.step(step_report(number))
    found = events(tmp_path / "run" / "tiny-sft" / "trace.json")
    assert [event["args"]["step"] for event in found if event["process"] == "controller"] == [1, 2, 3, 4, 5]
