"""Trackers that a manifest asks for: W&B offline and a real MLflow server, which may also be away."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlhf_api.job import Job
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.outputs import trackers
from rlhf_trainer.outputs.display import Display
from rlhf_trainer.outputs.opening import OutputOptions, open_listeners, require_trackers
from rlhf_trainer.run.publisher import Publisher
from rlhf_trainer.run_folder.folder import METRICS, JobFolder, add_to_summary
from rlhf_trainer.run_folder.step_metrics import metric_of
from tests.patience import PATIENCE_SECONDS
from tests.repo.tree import ROOT
from tests.trainer.chain.conftest import records, rlhf
from tests.trainer.outputs.conftest import DATA, MODEL, step_report
from tests.trainer.outputs.tracking import Stored, mlflow_server, offline_runs


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run waits for the tracker, however busy the machine is."""
    monkeypatch.setattr(trackers, "LAST_SECONDS", PATIENCE_SECONDS)


NOBODY = "http://127.0.0.1:9"
WANDB = {"project": "tests", "mode": "Offline"}
Documents = dict[str, Any]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, unused_port: int) -> Iterator[str]:
    """The URL of a real MLflow server."""
    with mlflow_server(tmp_path_factory.mktemp("mlflow"), unused_port) as url:
        yield url


@pytest.fixture(scope="session")
def unused_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def made(folder: Path, outputs: Documents) -> Job:
    """An SFT job with these outputs."""
    from tests.trainer.jobs import job

    spec = {
        "algorithm": {"name": "SFT"},
        "models": {"actor": {"uri": MODEL, "optimizer": {"learningRate": 1e-3}}},
        "data": DATA,
        "training": {"totalSteps": 4, "batchSize": 8},
        "runtime": {"env": [{"name": "MY_TOKEN", "value": "never-told"}]},
        "outputs": outputs,
    }
    return job(folder, "tiny", spec)


def run_steps(job: Job, output: Path, losses: dict[int, float], *, until: str = "") -> str:
    """A run of the steps in `losses`, from the start or after the steps before; what the terminal showed.

    until: what is in events.log before the run ends.
    """
    folder, shown = JobFolder(output, job), StringIO()
    display = Display(Console(file=shown, width=400))
    if min(losses) == 1:
        folder.begin(None, inputs={})
    else:
        lines = (folder.path / METRICS).read_text().splitlines(keepends=True)
        (folder.path / METRICS).write_text("".join(lines[: min(losses) - 1]))
    with open_listeners(OutputOptions(), output, display.warn) as outputs:
        publisher = Publisher(job, folder, display, outputs)
        with publisher.recording_the_end():
            publisher.begin(first_step=min(losses), total_steps=4)
            for number, loss in losses.items():
                publisher.step(step_report(number, loss__sft=loss))
            if until:
                wait_for_line(folder, until)
    return shown.getvalue()


def to_mlflow(server: str, request: pytest.FixtureRequest) -> Documents:
    return {"mlflow": {"uri": server, "experiment": request.node.name}}


def test_wandb_keeps_steps_and_manifest_without_variables(tmp_path: Path) -> None:
    run_steps(made(tmp_path, {"wandb": WANDB}), tmp_path / "run", {1: 3.0, 2: 2.5})
    (run,) = offline_runs(tmp_path / "run" / "tiny")
    assert (run.name, run.project, run.has_ended) == ("tiny", "tests", True)
    assert run.steps == {1: {"loss/sft": 3.0}, 2: {"loss/sft": 2.5}}
    assert run.config["spec"]["training"]["totalSteps"] == 4
    assert "never-told" not in json.dumps(run.config)


def test_wandb_goes_on_in_the_same_run_without_known_steps(tmp_path: Path) -> None:
    job = made(tmp_path, {"wandb": WANDB})
    run_steps(job, tmp_path / "run", {1: 3.0, 2: 2.5, 3: 2.0})
    time.sleep(1.1)  # W&B names its folders by the second
    run_steps(job, tmp_path / "run", {3: 2.0, 4: 1.0})
    first, second = offline_runs(tmp_path / "run" / "tiny")
    assert first.id == second.id
    assert (list(first.steps), list(second.steps)) == ([1, 2, 3], [4])


def callback(file: Path, **arguments: object) -> Documents:
    return {
        "callbacks": [{"entrypoint": "tests.trainer.own_points:Told", "arguments": {"file": str(file), **arguments}}]
    }


def told(file: Path) -> list[Documents]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_callback_is_told_every_step_once_and_the_end(tmp_path: Path) -> None:
    file, run = tmp_path / "told", tmp_path / "run"
    job = made(tmp_path, callback(file))
    run.mkdir()
    add_to_summary(run, job.name, {"steps": 4, "loss_after": 1.0})
    run_steps(job, run, {1: 3.0, 2: 2.5, 3: 2.0})
    run_steps(job, run, {3: 2.0, 4: 1.0})
    end = {"steps": 4, "loss_after": 1.0, "phase": "Succeeded"}
    losses = [{"step": step, "loss/sft": loss} for step, loss in {1: 3.0, 2: 2.5, 3: 2.0, 4: 1.0}.items()]
    assert told(file) == [*losses[:3], end, losses[3], end]
    assert told(file)[0] == records(run / "tiny")[0]


def test_a_failing_callback_is_retried_and_training_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "told"
    shown = run_steps(made(tmp_path, callback(file, fails_at=2, fails=1)), tmp_path / "run", {1: 3.0, 2: 2.5, 3: 2.0})
    assert [line.get("step") for line in told(file)] == [1, 2, 3, None], "what came before is not told twice"
    warning = re.search(r"tiny: spec.outputs.callbacks.0: (.*); training goes on, and it is tried again", shown)
    assert warning
    assert re.fullmatch(r"tests\S+:Told raised ZeroDivisionError: not now \(\S+own_points\.py:\d+\)", warning[1])
    assert "tiny: spec.outputs.callbacks.0: has all steps, after 1 failed tries" in shown


@pytest.mark.slow
def test_mlflow_has_every_step_and_the_manifest(server: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run_steps(made(tmp_path, to_mlflow(server, request)), tmp_path / "run", {1: 3.0, 2: 2.5})
    stored = Stored(server, request.node.name)
    assert [(run["info"]["run_name"], run["info"]["status"]) for run in stored.runs] == [("tiny", "FINISHED")]
    assert stored.curve("loss/sft") == [(1, 3.0), (2, 2.5)]
    assert stored.parameters()["spec.training.totalSteps"] == "4"
    assert "never-told" not in stored.parameters().values()


@pytest.mark.slow
def test_mlflow_goes_on_in_the_same_run(server: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    outputs = to_mlflow(server, request)
    run_steps(made(tmp_path, outputs), tmp_path / "run", {1: 3.0, 2: 2.5, 3: 2.0})
    run_steps(made(tmp_path, {**outputs, "tensorboard": True}), tmp_path / "run", {3: 2.0, 4: 1.0})
    assert Stored(server, request.node.name).curve("loss/sft") == [(1, 3.0), (2, 2.5), (3, 2.0), (4, 1.0)]


@pytest.mark.slow
def test_another_experiment_is_given_all_steps(server: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run_steps(made(tmp_path, to_mlflow(server, request)), tmp_path / "run", {1: 3.0, 2: 2.5})
    other = {"mlflow": {"uri": server, "experiment": "other"}}
    run_steps(made(tmp_path, other), tmp_path / "run", {3: 2.0})
    assert Stored(server, "other").curve("loss/sft") == [(1, 3.0), (2, 2.5), (3, 2.0)]


def test_an_absent_server_is_told_once_its_steps_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "LAST_SECONDS", 3.0)
    job = made(tmp_path, {"mlflow": {"uri": NOBODY, "experiment": "x"}})
    shown = run_steps(job, tmp_path / "run", {1: 3.0, 2: 2.5}, until="it is tried again")
    log = (tmp_path / "run" / "tiny" / "events.log").read_text().splitlines()
    told = [line.split(" ", 1)[1] for line in log if "spec.outputs.mlflow" in line]
    assert len(told) == 2
    assert f"API request to {NOBODY}/api/2.0/mlflow/experiments/get-by-name failed" in told[0]
    assert told[0].endswith("training goes on, and it is tried again")
    assert told[1].startswith("spec.outputs.mlflow: has not got 2 of the steps, after ")
    assert shown.count("warning: tiny: spec.outputs.mlflow: ") == 2
    assert json.loads((tmp_path / "run" / "tiny" / "status.json").read_text())["phase"] == "Succeeded"


@pytest.mark.slow
def test_a_server_that_dies_and_comes_back_has_all_steps(tmp_path: Path, unused_port: int) -> None:
    port = unused_port + 1
    job = made(tmp_path, {"mlflow": {"uri": f"http://127.0.0.1:{port}", "experiment": "x"}})
    output, display = tmp_path / "run", Display(Console(file=StringIO()))
    folder = JobFolder(output, job)
    folder.begin(None, inputs={})
    with open_listeners(OutputOptions(), output, display.warn) as outputs:
        publisher = Publisher(job, folder, display, outputs)
        with publisher.recording_the_end():
            publisher.begin(first_step=1, total_steps=4)
            with mlflow_server(tmp_path, port) as url:
                publisher.step(step_report(1, loss__sft=3.0))
                wait_for_step(folder, 1)
            publisher.step(step_report(2, loss__sft=2.5))
            wait_for_line(folder, "tried again")
            with mlflow_server(tmp_path, port) as url:
                publisher.step(step_report(3, loss__sft=2.0))
                wait_for_step(folder, 3)
                assert Stored(url, "x").curve("loss/sft") == [(1, 3.0), (2, 2.5), (3, 2.0)]


def wait_for_step(folder: JobFolder, step: int) -> None:
    wait_until(lambda: json.loads((folder.path / "mlflow.json").read_text())["step"] == step)


def wait_for_line(folder: JobFolder, text: str) -> None:
    wait_until(lambda: text in (folder.path / "events.log").read_text())


def wait_until(happened: Any) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            if happened():
                return
        except FileNotFoundError:
            pass
        time.sleep(0.1)
    pytest.fail("it did not happen")


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        ({"mlflow": {"uri": NOBODY, "experiment": "x"}}, f"tiny: spec.outputs.mlflow.uri: {NOBODY} does not answer: "),
        ({"wandb": {"project": "x"}}, "tiny: spec.outputs.wandb: WANDB_API_KEY is not set; mode Offline needs none"),
    ],
)
def test_a_tracker_that_cannot_be_told_is_a_sentence(
    outputs: Documents, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(EnvironmentProblem) as raised:
        require_trackers(made(tmp_path, outputs), tmp_path)
    assert str(raised.value).startswith(sentence)


def test_a_token_that_cannot_be_sent_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret\n")
    with pytest.raises(EnvironmentProblem) as raised:
        require_trackers(made(tmp_path, {"mlflow": {"uri": NOBODY, "experiment": "x"}}), tmp_path)
    assert str(raised.value) == "tiny: spec.outputs.mlflow: MLFLOW_TRACKING_TOKEN holds a space or a newline"


@pytest.mark.parametrize("state", ["", "[]", '{"target": 1', '{"run": 1}', "\x00"])
def test_a_state_that_is_no_state_is_a_new_run(state: str, tmp_path: Path) -> None:
    (tmp_path / "run" / "tiny").mkdir(parents=True)
    (tmp_path / "run" / "tiny" / "wandb.json").write_text(state)
    run_steps(made(tmp_path, {"wandb": WANDB}), tmp_path / "run", {1: 3.0})
    (run,) = offline_runs(tmp_path / "run" / "tiny")
    assert list(run.steps) == [1]


def test_all_trackers_that_cannot_be_told_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    outputs = {"mlflow": {"uri": NOBODY, "experiment": "x"}, "wandb": {"project": "x"}}
    with pytest.raises(EnvironmentProblem) as raised:
        require_trackers(made(tmp_path, outputs), tmp_path)
    fields = [line.split(": ")[1] for line in str(raised.value).splitlines()]
    assert fields == ["spec.outputs.wandb", "spec.outputs.mlflow.uri"]


def test_a_server_of_wandb_that_does_not_answer_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", NOBODY)
    with pytest.raises(EnvironmentProblem, match=f"spec.outputs.wandb: {NOBODY} does not answer: ConnectError"):
        require_trackers(made(tmp_path, {"wandb": {"project": "x"}}), tmp_path)


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_a_sentence(package: str, tmp_path: Path) -> None:
    outputs = {"wandb": {"wandb": WANDB}, "mlflow": {"mlflow": {"uri": NOBODY, "experiment": "x"}}}[package]
    job = made(tmp_path, outputs)
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from pathlib import Path\nfrom rlhf_api.files import load\n"
        "from rlhf_trainer.outputs.opening import require_trackers\n"
        f"require_trackers(load(Path({str(tmp_path / 'tiny.yaml')!r}))[0], Path({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    sentence = f"the Python package {package} is not installed; it is in rlhf-operator[trackers]"
    assert done.stderr.splitlines()[-1].endswith(f"{job.name}: spec.outputs.{package}: {sentence}")


@pytest.mark.slow
def test_a_resumed_run_is_one_run_in_all_trackers(server: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outputs = {"tensorboard": True, "wandb": WANDB, "mlflow": {"uri": server, "experiment": "whole"}}
    made(tmp_path, outputs)
    run = tmp_path / "run"
    common = ["run", tmp_path / "tiny.yaml", f"--output={run}", "--set=runtime="]
    for steps in (2, 3):
        done = rlhf(*common, f"--set=training.totalSteps={steps}")
        assert done.returncode == 0, done.stderr
        time.sleep(1.1)
    lines = records(run / "tiny")
    assert [line["step"] for line in lines] == [1, 2, 3]
    reader = EventAccumulator(str(run / "tensorboard" / "tiny"))
    reader.Reload()
    first, second = offline_runs(run / "tiny")
    assert first.id == second.id
    stored = Stored(server, "whole")
    for name in set(lines[0]) - {"step"}:
        assert metric_of(name), f"docs/metrics.md lacks {name}"
        expected = {line["step"]: pytest.approx(line[name], rel=1e-6) for line in lines}
        assert {event.step: event.value for event in reader.Scalars(name)} == expected
        assert {step: values[name] for step, values in {**first.steps, **second.steps}.items()} == expected
        assert dict(stored.curve(name)) == expected
        assert len(stored.curve(name)) == len(lines)
