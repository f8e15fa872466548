"""What the chain leaves with --tensorboard and --trace: curves, and a timeline of controller, ranks and transfers."""

import json
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf_trainer.run_folder.step_metrics import metric_of
from tests.trainer.chain.conftest import MANIFEST, records, rlhf
from tests.trainer.outputs.collector import Collector, assert_same, in_microseconds, traced

JOBS = ("helpful-sft", "helpful-rm", "helpful-ppo")
Chain = tuple[Path, str]


@pytest.fixture
def timeline(chain: Chain) -> list[dict[str, Any]]:
    """The events of the PPO job's trace.json."""
    events: list[dict[str, Any]] = json.loads((chain[0] / "helpful-ppo" / "trace.json").read_text())["traceEvents"]
    return events


def complete(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events that have a duration."""
    return [event for event in events if event["ph"] == "X"]


@pytest.mark.parametrize("name", JOBS)
def test_every_measurement_is_a_curve_and_is_documented(chain: Chain, name: str) -> None:
    reader = EventAccumulator(str(chain[0] / "tensorboard" / name))
    reader.Reload()
    lines = records(chain[0] / name)
    measured = {key for line in lines for key in line} - {"step"}
    assert set(reader.Tags()["scalars"]) == measured
    for key in measured:
        curve = {event.step: event.value for event in reader.Scalars(key)}
        assert curve == pytest.approx({line["step"]: line[key] for line in lines if key in line}, rel=1e-6)
        assert metric_of(key), f"docs/metrics.md lacks {key}"


def test_the_timeline_shows_controller_ranks_and_transfers(timeline: list[dict[str, Any]]) -> None:
    names = {event["pid"]: event["args"]["name"] for event in timeline if event["name"] == "process_name"}
    assert set(names.values()) == {"controller", "pool all"}
    shown = {(names[event["pid"]], event["tid"], event["cat"]) for event in complete(timeline)}
    phases = ("data", "transfer", "reshard", "generation", "scoring", "advantage", "update")
    assert shown >= {("pool all", rank, phase) for rank in (0, 1) for phase in phases}
    assert shown >= {("controller", 0, "controller")}
    calls = {event["name"] for event in complete(timeline)}
    assert calls >= {"dispatch actor.update_actor", "actor.update_actor: fetch", "actor.update_actor", "step 3"}


def test_a_step_of_the_timeline_takes_as_long_as_its_record_says(chain: Chain, timeline: list[dict[str, Any]]) -> None:
    steps = {event["args"]["step"]: event["dur"] / 1e6 for event in timeline if event["name"].startswith("step ")}
    assert steps == pytest.approx(
        {line["step"]: line["time/step"] for line in records(chain[0] / "helpful-ppo")}, rel=1e-3
    )


def test_what_happens_on_a_rank_happens_one_after_the_other(timeline: list[dict[str, Any]]) -> None:
    """Viewers nest the events of a thread; those of a rank follow each other."""
    ranks = [event for event in complete(timeline) if event["cat"] != "controller"]
    for rank in (0, 1):
        mine = sorted((event for event in ranks if event["tid"] == rank), key=lambda event: event["ts"])
        assert len(mine) > 3 * 10
        assert all(earlier["ts"] + earlier["dur"] <= later["ts"] + 1 for earlier, later in pairwise(mine))


def test_each_step_is_a_trace_of_the_same_spans(
    chain: Chain, timeline: list[dict[str, Any]], collector: Collector
) -> None:
    assert [span.name for span in collector.spans if not span.parent] == ["rl.loop"] * 3
    assert collector.resource["rl.algorithm"] == "PPO"
    assert collector.resource["rl.run.id"] == str((chain[0] / "helpful-ppo").resolve())
    assert {each.name for each in collector.spans} >= {"rl.loop", "rl.sample", "rl.reward", "rl.train", "rl.sync"}
    for span in collector.spans:
        outer = collector.parent_of(span)
        assert outer is None or outer.start <= span.start <= span.end <= outer.end, span
        assert outer is None or outer.trace == span.trace
    assert_same(in_microseconds(collector.spans), traced(timeline))
    assert (chain[0] / "helpful-ppo" / "events.log").read_text().count("spec.outputs.otel") == 0


def test_a_metrics_port_in_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        port = used.getsockname()[1]
        done = rlhf("run", MANIFEST, f"--output={tmp_path / 'run'}", f"--metrics-port={port}")
    assert (done.returncode, done.stderr) == (
        4,
        f"error: --metrics-port {port}: cannot be opened: Address already in use\n",
    )
