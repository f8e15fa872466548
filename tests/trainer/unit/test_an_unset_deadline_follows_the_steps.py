"""The deadline of a step's calls, where the user has set none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_trainer.controller.call_log import CallDeadline
from tests.trainer.jobs import job

MODEL = {"uri": "package://rlhf_examples/helpful/model"}


def deadline(
    folder: Path, predicted: float | None, training: Mapping[str, Any] | None = None, **changes: Any
) -> CallDeadline:
    models = {"actor": MODEL, "reward": changes.pop("reward", {"entrypoint": "rewards.scores:score"})}
    data = {"train": {"uri": "file:///rows.jsonl"}, "maxPromptTokens": 8, "maxResponseTokens": 8}
    spec = {"algorithm": {"name": "GRPO"}, "models": models, "data": data, "rollout": {"samplesPerPrompt": 2}}
    training = {"totalSteps": 9, "promptBatchSize": 4, **(training or {})}
    made = job(folder, "job", {**spec, "training": training, **changes})
    return CallDeadline(
        made.spec.training.call_deadline,
        predicted=predicted if made.derives_call_deadline else None,
        least=made.least_call_deadline,
    )


@pytest.mark.parametrize(
    ("predicted", "steps", "seconds"),
    [(20, [50, 5], 500), (20, [5], 300), (90, [5], 900), (20, [500], 1800), (None, [5], 1800)],
)
def test_it_is_ten_steps_within_bounds(
    tmp_path: Path, predicted: float | None, steps: list[float], seconds: float
) -> None:
    """The first step keeps the longest one; then the longest of the prediction and the steps counts."""
    found = deadline(tmp_path, predicted)
    assert found.seconds == 1800
    for each in steps:
        found.note_step(each)
    assert found.seconds == seconds


def test_code_of_a_reward_has_its_time(tmp_path: Path) -> None:
    found = deadline(tmp_path, 2, reward={"url": "http://host/score", "timeoutSeconds": 100, "attempts": 3})
    found.note_step(1)
    assert found.seconds == 600


def test_a_deadline_that_is_set_stays(tmp_path: Path) -> None:
    found = deadline(tmp_path, 2, {"callDeadlineSeconds": 900})
    found.note_step(200)
    assert found.seconds == 900


def test_turns_of_an_environment_keep_the_longest(tmp_path: Path) -> None:
    found = deadline(tmp_path, 2, rollout={"samplesPerPrompt": 2, "environment": {"entrypoint": "games.one:Game"}})
    found.note_step(1)
    assert found.seconds == 1800
