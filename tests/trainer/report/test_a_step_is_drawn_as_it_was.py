"""The picture of a step: a lane a rank, a bar where it worked, also for other steps; from the trace of the run."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from rlhf_api.job import Job
from rlhf_trainer.outputs.trace import Trace
from rlhf_trainer.report.run_record import read_run
from rlhf_trainer.report.step_timeline import StepTimeline, step_timeline
from rlhf_trainer.telemetry import CONTROLLER, TRANSFER, Span, StepReport
from tests.trainer.report.conftest import PPO, page_of, ppo_record, run_job

STEPS = 5
AHEAD = PPO.model_copy(
    update={"spec": PPO.spec.model_copy(update={"rollout": PPO.spec.rollout.model_copy(update={"max_staleness": 1})})}
)


def traced(folder: Path, job: Job, *, ahead: bool, ranks: int = 1) -> None:
    """A run whose steps take 10 s each: 4 of generation in one pool, then (or at the same time) 6 of an update."""
    run_job(folder, job, map(ppo_record, range(1, STEPS + 1)))
    trace = Trace(folder, latest=0)
    trace.begin(job, first_step=1, total_steps=STEPS)
    for step in range(1, STEPS + 1):
        began = 1000.0 + 10 * step
        written = began - 10 + 4 if ahead and step > 1 else began
        spans = [Span(CONTROLLER, f"step {step}", 0, began, began + 10)]
        for rank in range(ranks):
            spans += [
                Span("generation", "rollout.generate_sequences", rank, written, written + 4, "writers"),
                Span(TRANSFER, "actor.update_actor: fetch", rank, began, began + 4, "train"),
                Span("update", "actor.update_actor", rank, began + 4, began + 10, "train"),
            ]
        trace.step(StepReport(record={"step": step}, warnings=(), spans=spans))


def drawn(folder: Path) -> StepTimeline:
    """The picture of the only job of a run."""
    found = step_timeline(read_run(folder).jobs[0])
    assert found
    return found


def times(picture: StepTimeline) -> dict[str, tuple[float, float]]:
    """Hover text of each bar -> its begin and end, in seconds of the step."""
    return {bar.hover: (bar.start, bar.end) for _, bars in picture.lanes for bar in bars}


def test_pools_that_take_turns_do_not_overlap(tmp_path: Path) -> None:
    traced(tmp_path, PPO, ahead=False)
    picture = drawn(tmp_path)
    assert times(picture) == {
        "rollout.generate_sequences: 4 s": pytest.approx((0, 4)),
        "actor.update_actor: 6 s": pytest.approx((4, 10)),
    }
    assert [label for label, _ in picture.lanes] == ["train  40%", "writers  60%"]
    assert picture.later == picture.step


def test_responses_of_the_next_step_come_while_one_trains(tmp_path: Path) -> None:
    traced(tmp_path, AHEAD, ahead=True)
    picture = drawn(tmp_path)
    assert times(picture) == {
        f"rollout.generate_sequences for step {picture.step + 1}: 4 s": pytest.approx((4, 8)),
        "actor.update_actor: 6 s": pytest.approx((4, 10)),
    }
    text = page_of(tmp_path).sections["helpful-ppo"]
    assert f"the responses of step {picture.step + 1} are written meanwhile" in " ".join(text.split())
    assert f"generation for step {picture.step + 1}" in text


def test_the_step_is_one_whose_later_steps_were_traced_too(tmp_path: Path) -> None:
    traced(tmp_path, AHEAD, ahead=True)
    assert 1 < drawn(tmp_path).step < STEPS


def test_the_page_shows_each_lane_with_its_bars_to_scale(tmp_path: Path) -> None:
    traced(tmp_path, PPO, ahead=False)
    root = ET.fromstring(str(drawn(tmp_path).plot()))
    spans = {}
    for group in root.iter("g"):
        if (title := group.find("title")) is not None:
            numbers = [float(number) for number in re.findall(r"[-\d.]+", str(group[1].get("d")))[::2]]
            spans[str(title.text)] = (min(numbers), max(numbers))
    (written, trained) = spans["rollout.generate_sequences: 4 s"], spans["actor.update_actor: 6 s"]
    assert written[1] == pytest.approx(trained[0], abs=0.1)
    assert (written[1] - written[0]) / (trained[1] - trained[0]) == pytest.approx(4 / 6, rel=0.01)
    texts = [str(text.text) for text in root.iter("text")]
    assert {"train  40%", "writers  60%", "generation", "update", "0 s", "10 s"} <= set(texts)


@pytest.mark.parametrize(("ranks", "lanes"), [(4, 8), (5, 2), (600, 2)])
def test_of_many_ranks_the_first_of_each_pool_is_drawn(tmp_path: Path, ranks: int, lanes: int) -> None:
    traced(tmp_path, PPO, ahead=False, ranks=ranks)
    picture = drawn(tmp_path)
    assert picture.lanes[0][0].startswith("train rank 0  ")
    assert len(picture.lanes) == lanes


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"traceEvents": [{}]}', '{"traceEvents": [1]}', '{"traceEvents": 1}']
)
def test_a_damaged_trace_is_told_and_leaves_the_rest_of_the_page(tmp_path: Path, text: str) -> None:
    folder = run_job(tmp_path, PPO, map(ppo_record, range(1, 3)))
    (folder.path / "trace.json").write_text(text)
    shown = page_of(tmp_path).sections["helpful-ppo"]
    assert "trace.json cannot be read" in shown
    assert "one step" not in shown
    assert "Where the time went" in shown


def test_names_in_a_trace_are_escaped(tmp_path: Path) -> None:
    traced(tmp_path, PPO, ahead=False)
    path = tmp_path / "helpful-ppo" / "trace.json"
    trace = json.loads(path.read_text())
    for event in trace["traceEvents"]:
        event["name"] = event["name"].replace("actor", "<script>")
    path.write_text(json.dumps(trace))
    assert not page_of(tmp_path).scripts
