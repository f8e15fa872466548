"""Steps from which nothing can be learned, or whose generator is too far from the trainer: told with their cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_api.spec.watch import react
from rlhf_trainer.run.job_run import StepWatch
from rlhf_trainer.run_folder.folder import JobFolder
from rlhf_trainer.telemetry import StepReport
from tests.trainer.jobs import job

LEARNS = {"reward/mean": 0.4, "reward/std": 0.5, "groups/with_signal": 0.5, "grad_norm/policy": 1.0}
CAUSES: Mapping[str, tuple[Mapping[str, float], str]] = {
    "no reward": ({"reward/mean": 0.0, "reward/std": 0.0}, "every response got the reward 0; does the prompt ask"),
    "failed episodes": (
        {"reward/mean": 0.5, "reward/std": 0.0, "episodes/failed": 3.0},
        "3 responses have no reward, and every other one got 0.5",
    ),
    "one reward": ({"reward/mean": 1.0, "reward/std": 1e-9}, "every response got the reward 1; is the task too easy?"),
    "equal groups": ({"groups/with_signal": 0.0}, "the responses to each prompt got equal rewards; take easier"),
    "cut responses": ({"response_finished/mean": 0.0}, "every response was cut off (spec.data.maxResponseTokens)"),
    "no gradient": ({"grad_norm/policy": 0.0}, "every gradient is 0"),
}


def job_with(folder: Path, **watch: Any) -> Job:
    spec: dict[str, Any] = {
        "algorithm": {"name": "GRPO"},
        "models": {"actor": {"uri": "hf://a/b"}, "reward": {"verifier": {"name": "Math"}}},
        "data": {"train": {"uri": "hf://a/b"}},
        "rollout": {"samplesPerPrompt": 2},
        "training": {"totalSteps": 30, "promptBatchSize": 2},
        "watch": watch,
    }
    return job(folder, "one", spec)


def report(step: int, **changes: float) -> StepReport:
    record = {"step": step, **LEARNS, **changes}
    return StepReport(record=record, warnings=["odd"], examples=["row 0", "row 3"], spans=())


def warned_steps(watch: StepWatch, changes: list[Mapping[str, float]]) -> list[int]:
    """The steps (from 1) that warn of more than the report itself does."""
    reports = [watch.look(report(step, **each)) for step, each in enumerate(changes, start=1)]
    return [step for step, each in enumerate(reports, start=1) if each.warnings != ["odd"]]


@pytest.mark.parametrize("cause", CAUSES)
def test_three_steps_without_signal_are_told_with_their_cause(cause: str, tmp_path: Path) -> None:
    changes, told = CAUSES[cause]
    watch = StepWatch(job_with(tmp_path))
    found = [watch.look(report(step, **changes)).warnings for step in (1, 2, 3)]
    assert found[:2] == [["odd"], ["odd"]]
    assert found[2][1].startswith(f"no signal in 3 steps in a row: {told}")
    assert found[2][1].endswith("; for example row 0 and row 3")


def test_later_warnings_become_rare_and_a_signal_starts_anew(tmp_path: Path) -> None:
    void: Mapping[str, float] = CAUSES["no reward"][0]
    assert warned_steps(StepWatch(job_with(tmp_path)), [void] * 24) == [3, 6, 12, 24]
    assert warned_steps(StepWatch(job_with(tmp_path)), [void, void, {}, void, void, {}] * 3) == []
    assert warned_steps(StepWatch(job_with(tmp_path, noSignal="Off")), [void] * 24) == []


def test_a_job_that_is_to_fail_fails(tmp_path: Path) -> None:
    watch = StepWatch(job_with(tmp_path, noSignal="Fail"))
    with pytest.raises(SpecError, match=r"^one: spec\.watch\.noSignal: no signal in 3 steps in a row"):
        warned_steps(watch, [CAUSES["no reward"][0]] * 3)


FAR = {"kl/rollout": 0.05}
TOLD = "KL between generator and trainer is 0.05 a token, more than 0.02"
SKIPPED = {**FAR, "skipped_updates/mismatch": 1.0}


@pytest.mark.parametrize(
    ("action", "changes", "told"),
    [
        ("Warn", FAR, TOLD),
        ("Warn", {"kl/rollout": 0.01}, None),
        ("Warn", {"kl/rollout": math.nan}, TOLD.replace("0.05", "nan")),
        (
            "SkipUpdate",
            SKIPPED,
            f"{TOLD}, so the actor was not updated",
        ),
        ("SkipUpdate", {**FAR, "skipped_updates/mismatch": 0.0}, None),
    ],
)
def test_a_generator_too_far_from_the_trainer_is_told(
    action: str, changes: Mapping[str, float], told: str | None, tmp_path: Path
) -> None:
    watch = StepWatch(job_with(tmp_path, mismatch={"kl": 0.02, "action": action}))
    assert watch.look(report(1, **changes)).warnings == ["odd", *([told] if told else [])]
    assert StepWatch(job_with(tmp_path)).look(report(1, **changes)).warnings == ["odd"]


def test_a_job_that_is_to_fail_for_it_fails(tmp_path: Path) -> None:
    watch = StepWatch(job_with(tmp_path, mismatch={"action": "Fail"}))
    watch.look(report(1, **{"skipped_updates/mismatch": 0.0}))
    with pytest.raises(SpecError, match=r"^one: spec\.watch\.mismatch: KL between .* so the actor was not updated$"):
        watch.look(report(2, **SKIPPED))


def test_the_status_keeps_the_latest_warnings(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, job_with(tmp_path))
    folder.path.mkdir()
    for step in range(1, 11):
        folder.warn(f"step {step}: odd")
        folder.record({"step": float(step)}, total_steps=30, stage="GRPO")
    status = (folder.path / "status.json").read_text()
    assert '"step 10: odd"' in status
    assert '"step 3: odd"' in status
    assert '"step 2: odd"' not in status


def test_a_reaction_warns_fails_or_is_off() -> None:
    assert react("Off", "one: spec.watch.changedCode", ["goes on with other code"]) == ()
    assert react("Warn", "one: spec.watch.changedCode", ["goes on with other code"]) == ["goes on with other code"]
    with pytest.raises(SpecError, match=r"^one: spec\.watch\.changedCode: goes on with other code$"):
        react("Fail", "one: spec.watch.changedCode", ["goes on with other code"])
    assert not react("Fail", "one: spec.watch.changedCode", [])
