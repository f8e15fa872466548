"""Steps of episodes with tools, as a collector gets them and as trace.json has them; and a collector that is away."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from rlhf_trainer.environments.of_job import environments_of
from rlhf_trainer.outputs import spans as otel
from rlhf_trainer.outputs.display import Display
from rlhf_trainer.outputs.opening import OutputOptions, open_listeners
from rlhf_trainer.run.publisher import Publisher
from rlhf_trainer.run_folder.folder import JobFolder
from rlhf_trainer.run_folder.step_metrics import repeats
from rlhf_trainer.telemetry import EPISODE_PHASES, StepReport, recorder, report_of
from tests.patience import PATIENCE_SECONDS
from tests.trainer.agents.stage import TEMPLATE
from tests.trainer.environments.scripted import END, ScriptedEngine, play_episodes
from tests.trainer.jobs import job
from tests.trainer.outputs.collector import Collector, assert_same, in_microseconds, traced
from tests.trainer.outputs.conftest import DATA, MODEL, step_report
from tests.trainer.tiny import EXAMPLE_MODEL

NOBODY = "http://127.0.0.1:9"
ADD = '<tool_call>{"name": "add", "arguments": {"one": 2, "other": 3}}</tool_call>'
EPISODES = 3


def grpo(folder: Path, endpoint: str) -> Any:
    """A job whose episodes have a tool."""
    spec = {
        "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.0}},
        "models": {
            "actor": {"uri": MODEL, "optimizer": {"learningRate": 1e-3}},
            "reward": {"entrypoint": "tests.trainer.rewards.user_functions:lengths"},
        },
        "data": DATA,
        "rollout": {"samplesPerPrompt": 2, "tools": ["tests.trainer.environments.user_environments:add"]},
        "training": {"totalSteps": 4, "promptBatchSize": 2},
        "outputs": {"otel": {"endpoint": endpoint}},
    }
    return job(folder, "tools", spec)


def step_of_episodes(folder: Path) -> StepReport:
    """A step whose episodes have two calls of a tool in their first turn, and none in the second."""
    tokenizer = AutoTokenizer.from_pretrained(str(EXAMPLE_MODEL))
    tokenizer.chat_template = TEMPLATE
    calls = tokenizer(ADD + ADD, add_special_tokens=False)["input_ids"]

    class Engine(ScriptedEngine):
        script = staticmethod(lambda prompt, seed: [*calls, END] if len(prompt) <= 3 else [5, END])

    environments = environments_of(grpo(folder, NOBODY))
    environments.ready()
    recorder.drain()
    began = time.time()
    with recorder.span("generation", "actor.generate_sequences"):
        prompts = [[10, 11, 12] for _ in range(EPISODES)]
        episodes = play_episodes(tokenizer, Engine(), environments, prompts, limits=(8, 400, 3))
    environments.close()
    assert [(each.facts["calls"], each.failure) for each in episodes] == [(2, "")] * EPISODES
    return report_of(1, began, [recorder.drain()], repeats)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> StepReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "pool", "all")
        return step_of_episodes(tmp_path_factory.mktemp("tools"))


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector, for which a job waits however busy the machine is."""
    monkeypatch.setattr(otel, "LAST_SECONDS", PATIENCE_SECONDS)
    with Collector() as collector:
        yield collector


def run(folder: Path, endpoint: str, *reports: StepReport) -> str:
    """A run that reports these steps; what the terminal showed."""
    made, shown = grpo(folder, endpoint), StringIO()
    display, job_folder = Display(Console(file=shown, width=400)), JobFolder(folder / "run", made)
    job_folder.begin(None, inputs={})
    with open_listeners(OutputOptions(), folder / "run", display.warn) as outputs:
        publisher = Publisher(made, job_folder, display, outputs)
        with publisher.recording_the_end():
            publisher.begin(first_step=1, total_steps=4)
            for each in reports:
                publisher.step(each)
    return shown.getvalue()


def test_an_episode_holds_its_turns_and_a_turn_its_tools(
    report: StepReport, collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    shown = run(tmp_path, f"{collector.url}/v1/traces/", report)  # as OTEL_EXPORTER_OTLP_TRACES_ENDPOINT has it
    assert "otel" not in shown
    assert collector.headers["authorization"] == "Bearer abc"
    outer = {span.id: span.name for span in collector.spans}
    assert Counter((span.name, outer.get(span.parent, "")) for span in collector.spans) == {
        ("rl.loop", ""): 1,
        ("rl.sample", "rl.loop"): 1,
        ("rlhf.episode", "rl.sample"): EPISODES,
        ("rlhf.environment", "rlhf.episode"): EPISODES * 3,
        ("chat", "rlhf.episode"): EPISODES * 2,
        ("execute_tool add", "rlhf.environment"): EPISODES * 2,
    }
    for span in collector.spans:
        parent = collector.parent_of(span)
        assert parent is None or parent.start <= span.start <= span.end <= parent.end, (parent, span)
    tool = next(span for span in collector.spans if "tool" in span.name).attributes
    assert (tool["gen_ai.operation.name"], tool["gen_ai.tool.name"]) == ("execute_tool", "add")
    events = json.loads((tmp_path / "run" / "tools" / "trace.json").read_text())["traceEvents"]
    assert_same(in_microseconds(collector.spans), traced(events))


def test_episodes_change_no_time_of_a_phase(report: StepReport) -> None:
    times = {name for name in report.record if name.startswith("time/")}
    assert times == {"time/step", "time/generation", "time/transfer", "time/controller"}
    (generation,) = (span for span in report.spans if span.phase == "generation")
    assert report.record["time/generation"] == pytest.approx(generation.end - generation.start)


def test_a_collector_that_is_away_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "LAST_SECONDS", 0.5)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    shown = run(tmp_path, NOBODY, *map(step_report, (1, 2, 3)))
    lines = [line for line in shown.splitlines() if "outputs.otel" in line]
    assert len(lines) == 2, shown
    assert f"tools: spec.outputs.otel: {NOBODY}/v1/traces does not take spans; training goes on" in lines[0]
    assert "12 of 12 spans were not sent" in lines[1]


def test_a_redirection_is_a_failure(collector: Collector, tmp_path: Path) -> None:
    collector.status = 302
    shown = run(tmp_path, collector.url, step_report(1))
    assert "does not take spans; training goes on" in shown
    assert "4 of 4 spans were not sent" in shown


def test_what_waits_is_bounded(collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "MAX_WAITING", 3)
    shown = run(tmp_path, collector.url, step_report(1), step_report(2))
    assert not collector.spans
    assert "8 of 8 spans were not sent by the end of the job" in shown


def test_a_wrong_variable_ends_traces_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER", "nobody")
    shown = run(tmp_path, NOBODY, step_report(1))
    assert "training goes on without traces" in shown
    assert "4 of 4 spans were not sent" in shown


def test_a_step_of_very_many_episodes_keeps_the_file_small(
    report: StepReport, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_trainer.outputs.trace.MAX_OF_EPISODES", 4)
    run(tmp_path, collector.url, report)
    events = json.loads((tmp_path / "run" / "tools" / "trace.json").read_text())["traceEvents"]
    assert len([each for each in events if each["ph"] == "b"]) == 4
    (step,) = (each for each in events if each["name"] == "step 1")
    assert step["args"] == {"step": 1, "left_out": EPISODES * 8 - 4}
    assert len([each for each in collector.spans if each.attributes["rlhf.phase"] in EPISODE_PHASES]) == EPISODES * 8
