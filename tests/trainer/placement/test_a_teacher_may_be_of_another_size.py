"""Teachers of another size than the actor, beside it, on a pool of their own and on servers: the same steps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.names import Role
from tests.trainer.jobs import job
from tests.trainer.measured import SHARED
from tests.trainer.placement.sweep import STEPS, Outcome, pools_of, run
from tests.trainer.teachers import teaching
from tests.trainer.tiny import divisible_config, save_tiny

DIVERGENCES: dict[str, dict[str, Any]] = {"Sampled": {}, "Reverse": {"divergence": "Reverse", "topK": 16}}


def outcome(
    folder: Path,
    folders: Mapping[Role, str],
    options: Mapping[str, Any],
    *pools: list[str],
    slots: tuple[int, ...],
    servers: Mapping[str, str] | None = None,
    rows: str = "package://rlhf_examples/helpful/train.jsonl",
) -> Outcome:
    """servers: name of a teacher -> URL of its server; the teacher's model is used if it is in a pool."""
    folder.mkdir()
    optimizer = {"learningRate": 1e-3, "warmupSteps": 2}
    sizes = {"parallelism": {"tensor": 2}} if len(pools) > 1 else {}
    spec: dict[str, Any] = {
        "algorithm": {"name": "Distillation", **options},
        "models": {
            "actor": {"uri": f"file://{folders['actor']}", "optimizer": optimizer},
            **(
                {"teacher": {"uri": f"file://{folders['teacher']}", **sizes}}
                if any("teacher" in pool for pool in pools)
                else {}
            ),
            "teacherEndpoints": [
                {"name": name, "url": url, "model": "x", "timeoutSeconds": 30} for name, url in (servers or {}).items()
            ],
        },
        "data": {
            "train": {"uri": rows, "limit": 40},
            "maxPromptTokens": 16,
            "maxResponseTokens": 6,
        },
        "training": {"totalSteps": STEPS, "promptBatchSize": 8, "miniBatchSize": 4, "callDeadlineSeconds": 60},
        "resources": {"device": "CPU"},
        "placement": {"mode": "Manual", "pools": pools_of(pools, slots=slots)},
    }
    return run(folder, job(folder, "distilled", spec), folders, prepare=ask_without_a_proxy)


def ask_without_a_proxy() -> None:
    os.environ["NO_PROXY"] = "127.0.0.1"


def compare(one: Outcome, other: Outcome) -> None:
    """Steps that measure the same, with a divergence from a teacher and without a reward."""
    for found, expected in zip(measures(one), measures(other), strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert {"kl/teacher", "loss/policy", "grad_norm/policy"} <= found.keys()
        assert not any(key.startswith("reward/") for key in found)
        assert found["grad_norm/policy"] > 0


def measures(one: Outcome) -> list[dict[str, float]]:
    unlike = (*SHARED, "bytes/", "sync_bytes/")
    return [{key: value for key, value in each.items() if not key.startswith(unlike)} for each in one.records]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_teacher_of_another_size_may_have_its_own_pool(name: str, tmp_path: Path) -> None:
    teacher = save_tiny(tmp_path / "teacher", seed=5, config=divisible_config())
    folders: dict[Role, str] = {"actor": save_tiny(tmp_path / "actor", seed=3), "teacher": teacher}
    options = DIVERGENCES[name]
    together = outcome(tmp_path / "one", folders, options, ["actor", "teacher"], slots=(1,))
    apart = outcome(tmp_path / "two", folders, options, ["actor"], ["teacher"], slots=(1, 2))
    assert (together.processes, apart.processes) == (1, 3)
    compare(apart, together)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_teacher_on_a_server_teaches_as_its_model_does(name: str, tmp_path: Path) -> None:
    teacher = save_tiny(tmp_path / "teacher", seed=5, config=divisible_config())
    folders: dict[Role, str] = {"actor": save_tiny(tmp_path / "actor", seed=3), "teacher": teacher}
    options = DIVERGENCES[name]
    inside = outcome(tmp_path / "one", folders, options, ["actor", "teacher"], slots=(1,))
    with teaching(teacher) as (asked, url):
        outside = outcome(tmp_path / "two", folders, options, ["actor"], slots=(2,), servers={"it": url})
    assert len(asked.asked) == STEPS * 8
    compare(outside, inside)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_column_names_the_teacher_of_each_row(name: str, tmp_path: Path) -> None:
    """All three teachers are one model, so the steps are those of one teacher; the servers see their own rows only."""
    teacher = save_tiny(tmp_path / "teacher", seed=5, config=divisible_config())
    folders: dict[Role, str] = {"actor": save_tiny(tmp_path / "actor", seed=3), "teacher": teacher}
    domains, rows = ("sums", 7, "none"), tmp_path / "rows.jsonl"
    about = [{"prompt": f"{domains[row % 3]}: {row}", "domain": str(domains[row % 3])} for row in range(40)]
    rows.write_text("".join(json.dumps(each) + "\n" for each in about))
    roles = ["actor", "teacher"]
    alone = outcome(tmp_path / "one", folders, DIVERGENCES[name], roles, slots=(1,), rows=f"file://{rows}")
    options = {**DIVERGENCES[name], "teacherKey": "domain"}
    with ExitStack() as stack:
        servers = {domain: stack.enter_context(teaching(teacher)) for domain in ("sums", "7")}
        urls = {domain: url for domain, (_, url) in servers.items()}
        several = outcome(tmp_path / "two", folders, options, roles, slots=(2,), servers=urls, rows=f"file://{rows}")
    for domain, (asked, _) in servers.items():
        texts = [asked.tokenizer.decode(each) for each in asked.asked]
        assert texts
        assert all(text.startswith(f"{domain}: ") for text in texts), texts
    compare(several, alone)
