"""An environment package in the format of `verifiers` is an agent: its tasks are rows, and it gives its own reward.

It runs where the package is: pip install verifiers.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.environments.scripted_model import scripted_model

pytest.importorskip("verifiers.v1")
from rlhf_trainer.environments import verifiers_environments

HUB = Path(__file__).parent / "hub"
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HUB))


def config() -> dict[str, Any]:
    return {"taskset": {"id": "sums-to-ten", "largest": 2}, "agent": AGENT}


def test_the_tasks_of_a_taskset_are_rows() -> None:
    rows = list(verifiers_environments.rows(**config()))
    assert [row["prompt"] for row in rows[:4]] == ["0+0", "0+1", "0+2", "1+0"]
    assert len(rows) == 9
    assert json.loads(rows[5]["task"])["answer"] == "3"


def test_the_reward_is_that_of_the_environment() -> None:
    row = list(verifiers_environments.rows(**config()))[5]
    with scripted_model("3", "4") as seen:
        assert asyncio.run(verifiers_environments.run(row, **config())) == 0.5, "its weight is a half"
        assert asyncio.run(verifiers_environments.run(row, **config())) == 0.0
    assert [each["messages"] for each in seen] == [
        [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2"}]
    ] * 2
    assert {each["model"] for each in seen} == {"policy"}


def test_an_episode_that_fails_there_is_an_error() -> None:
    row = next(verifiers_environments.rows(**config()))
    with scripted_model(), pytest.raises(RuntimeError, match="Error: "):
        asyncio.run(verifiers_environments.run(row, **config()))
