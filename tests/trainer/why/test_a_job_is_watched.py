"""A running job is looked at by the same rules: warning, status, metric, and what `watch.causes` says."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlhf_api.files import dump
from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_trainer.errors import Paused
from rlhf_trainer.outputs.display import Display
from rlhf_trainer.run.publisher import Publisher
from rlhf_trainer.run.stopping import StopSignals
from rlhf_trainer.run_folder.folder import METRICS, JobFolder
from rlhf_trainer.telemetry import StepReport
from rlhf_trainer.why.seen import Seen
from tests.trainer.why.plants import FIGURES, read

CAUSE = "LengthHacking"


@pytest.fixture(scope="module")
def seen() -> Seen:
    return read("length")[FIGURES[0]]


class Watched:
    """A job whose recorded steps are published once more."""

    def __init__(self, folder: Path, seen: Seen, reaction: str, *, done: int = 0) -> None:
        spec = {**seen.spec, "watch": {"causes": reaction}}
        document = {"apiVersion": "rlhf.hybridflow.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "ppo"}}
        self.job, self.seen, self.done = Job.parse({**document, "spec": spec}), seen, done
        self.stop = StopSignals(lambda _: None)
        own = JobFolder(folder, self.job)
        own.path.mkdir(parents=True, exist_ok=True)
        rows = "".join(json.dumps(row) + "\n" for row in seen.rows)
        (own.path / "rollouts.jsonl").write_text(rows)
        (own.path / "job.yaml").write_text(dump(self.job))
        display = Display(Console(file=io.StringIO()))
        self.publisher = Publisher(self.job, own, display, pause=self.stop.ask_to_pause)
        self.path = own.path

    def go_on(self, last: int | None = None) -> None:
        for record in self.seen.records[self.done : last]:
            self.publisher.step(StepReport(record=record, warnings=[], spans=[]))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "status.json").read_text())
        return found


def step_of(cause: str) -> int:
    """The step in a cause of the status."""
    found = re.match(r"\w+ at step (\d+): likely cause", cause)
    assert found
    return int(found[1])


def test_a_cause_is_told_once(tmp_path: Path, seen: Seen) -> None:
    watched = Watched(tmp_path, seen, "Warn")
    watched.go_on()
    lines = [line for line in (watched.path / "events.log").read_text().splitlines() if CAUSE in line]
    assert len(lines) == 1
    assert "likely cause of trouble" in lines[0]
    (cause,) = watched.status()["causes"]
    step = step_of(cause)
    assert cause.startswith(CAUSE)
    assert step % 5 == 0
    records = [json.loads(line) for line in (watched.path / METRICS).read_text().splitlines()]
    told = [record["step"] for record in records if record.get(f"cause/{CAUSE}") == 1.0]
    assert told == list(range(step, len(records) + 1))


def test_it_may_be_off(tmp_path: Path, seen: Seen) -> None:
    watched = Watched(tmp_path, seen, "Off")
    watched.go_on()
    assert "causes" not in watched.status() or not watched.status()["causes"]


def test_it_may_fail_the_job(tmp_path: Path, seen: Seen) -> None:
    watched = Watched(tmp_path, seen, "Fail")
    with pytest.raises(SpecError, match=f"ppo: spec.watch.causes: likely cause of trouble.*{CAUSE}"):
        watched.go_on()
    step = step_of(watched.status()["causes"][0])
    assert len((watched.path / METRICS).read_text().splitlines()) == step, "the step is recorded"


def test_it_may_pause_the_run_which_then_goes_on(tmp_path: Path, seen: Seen) -> None:
    watched = Watched(tmp_path, seen, "Pause")
    watched.go_on()
    with pytest.raises(Paused) as paused:
        watched.stop.end("the checkpoint of step 10 is saved")
    way = "the checkpoint of step 10 is saved; the same command goes on"
    assert str(paused.value) == f"ppo: paused by spec.watch.causes ({CAUSE}); {way}"
    (cause,) = watched.status()["causes"]
    step = step_of(cause)
    for done in (step - 3, step, step + 1, step + 6):
        begun = Watched(tmp_path / str(done), seen, "Pause")
        begun.go_on(done)
        Watched(tmp_path / str(done), seen, "Off", done=done).go_on(done + 1)
        resumed = Watched(tmp_path / str(done), seen, "Pause", done=done + 1)
        resumed.go_on(done + 2)
        assert resumed.status().get("causes", []) == [cause] * (step <= done), "the status knows it at once"
        resumed.done = done + 2
        resumed.go_on()
        assert [bool(each.stop.pause) for each in (begun, resumed)] == [step <= done, step > done], done
        assert resumed.status()["causes"] == [cause]
