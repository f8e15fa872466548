"""Event files, read back by TensorBoard's own reader."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path

from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf_trainer.outputs.display import Display
from rlhf_trainer.outputs.opening import OutputOptions, open_listeners
from rlhf_trainer.run.publisher import Publisher
from tests.trainer.outputs.conftest import step_report


def run_steps(publisher_with: Callable[..., Publisher], output: Path, losses: dict[int, float]) -> None:
    """A run of the steps in `losses`."""
    with open_listeners(OutputOptions(tensorboard=True), output, print) as outputs:
        publisher = publisher_with(Display(Console(file=StringIO())), outputs)
        with publisher.recording_the_end():
            publisher.begin(first_step=min(losses), total_steps=4)
            for number, loss in losses.items():
                publisher.step(step_report(number, loss__sft=loss))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve that TensorBoard shows: name -> (step, value)."""
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_each_metric_is_a_curve(publisher_with: Callable[..., Publisher], tmp_path: Path) -> None:
    run_steps(publisher_with, tmp_path / "run", {1: 3.0, 2: 2.5})
    assert scalars(tmp_path / "run" / "tensorboard" / "tiny-sft") == {"loss/sft": [(1, 3.0), (2, 2.5)]}


def test_a_run_from_the_start_replaces_the_curve(publisher_with: Callable[..., Publisher], tmp_path: Path) -> None:
    run_steps(publisher_with, tmp_path / "run", {1: 3.0, 2: 2.5})
    run_steps(publisher_with, tmp_path / "run", {1: 4.0})
    assert scalars(tmp_path / "run" / "tensorboard" / "tiny-sft") == {"loss/sft": [(1, 4.0)]}


def test_a_resumed_run_goes_on_where_it_resumed(publisher_with: Callable[..., Publisher], tmp_path: Path) -> None:
    run_steps(publisher_with, tmp_path / "run", {1: 3.0, 2: 2.5, 3: 2.0})
    run_steps(publisher_with, tmp_path / "run", {3: 1.5, 4: 1.0})
    assert scalars(tmp_path / "run" / "tensorboard" / "tiny-sft") == {
        "loss/sft": [(1, 3.0), (2, 2.5), (3, 1.5), (4, 1.0)]
    }
