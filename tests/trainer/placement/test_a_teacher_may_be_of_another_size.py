"""A teacher of another size than the actor, beside it and on a pool of its own: the same steps, without any reward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.names import Role
from tests.trainer.jobs import job
from tests.trainer.measured import SHARED
from tests.trainer.placement.sweep import STEPS, Outcome, pools_of, run
from tests.trainer.tiny import divisible_config, save_tiny

DIVERGENCES: dict[str, dict[str, Any]] = {"Sampled": {}, "Reverse": {"divergence": "Reverse", "topK": 16}}


def outcome(
    folder: Path, folders: Mapping[Role, str], options: Mapping[str, Any], *pools: list[str], slots: tuple[int, ...]
) -> Outcome:
    folder.mkdir()
    optimizer = {"learningRate": 1e-3, "warmupSteps": 2}
    sizes = {"parallelism": {"tensor": 2}} if len(pools) > 1 else {}
    spec = {
        "algorithm": {"name": "Distillation", **options},
        "models": {
            "actor": {"uri": f"file://{folders['actor']}", "optimizer": optimizer},
            "teacher": {"uri": f"file://{folders['teacher']}", **sizes},
        },
        "data": {
            "train": {"uri": "package://rlhf_examples/helpful/train.jsonl", "limit": 40},
            "maxPromptTokens": 16,
            "maxResponseTokens": 6,
        },
        "training": {"totalSteps": STEPS, "promptBatchSize": 8, "miniBatchSize": 4, "callDeadlineSeconds": 60},
        "resources": {"device": "CPU"},
        "placement": {"mode": "Manual", "pools": pools_of(pools, slots=slots)},
    }
    return run(folder, job(folder, "distilled", spec), folders)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_teacher_of_another_size_may_have_its_own_pool(name: str, tmp_path: Path) -> None:
    teacher = save_tiny(tmp_path / "teacher", seed=5, config=divisible_config())
    folders: dict[Role, str] = {"actor": save_tiny(tmp_path / "actor", seed=3), "teacher": teacher}
    options = DIVERGENCES[name]
    together = outcome(tmp_path / "one", folders, options, ["actor", "teacher"], slots=(1,))
    apart = outcome(tmp_path / "two", folders, options, ["actor"], ["teacher"], slots=(1, 2))
    assert (together.processes, apart.processes) == (1, 3)
    for one, other in zip(apart.records, together.records, strict=True):
        found, expected = (
            {key: value for key, value in each.items() if not key.startswith((*SHARED, "bytes/", "sync_bytes/"))}
            for each in (one, other)
        )
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert {"kl/teacher", "loss/policy", "grad_norm/policy"} <= found.keys()
        assert not any(key.startswith("reward/") for key in found)
        assert found["grad_norm/policy"] > 0
