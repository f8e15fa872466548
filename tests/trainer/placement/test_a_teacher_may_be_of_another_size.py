"""Teachers of another size than the actor, beside it, on a pool of their own and on servers: the same steps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
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

FEW_DIVERGENCES = ("Reverse", pytest.param("Sampled", marks=pytest.mark.slow))
"""`test_a_column_names_the_teacher_of_each_row` takes both, of a model and of servers."""


def outcome(
    folder: Path,
    folders: Mapping[Role, str],
    options: Mapping[str, Any],
    *pools: list[str],
    slots: tuple[int, ...],
    servers: Mapping[str, str] | None = None,
    rows: str,
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


Together = Callable[[str], Outcome]
DOMAINS = ("sums", "7", "none")
"""Domains of the rows in turn; the teacher of the last one is the model beside the actor."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Role, str]:
    root = tmp_path_factory.mktemp("models")
    teacher = save_tiny(root / "teacher", seed=5, config=divisible_config())
    return {"actor": save_tiny(root / "actor", seed=3), "teacher": teacher}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URI of prompts with their domain."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    about = [{"prompt": f"{DOMAINS[row % 3]}: {row}", "domain": DOMAINS[row % 3]} for row in range(40)]
    path.write_text("".join(json.dumps(each) + "\n" for each in about))
    return f"file://{path}"


@pytest.fixture(scope="module")
def together(folders: Mapping[Role, str], rows: str, tmp_path_factory: pytest.TempPathFactory) -> Together:
    """Return a function for the outcome of a divergence with actor and teacher on one slot."""

    @cache
    def made(name: str) -> Outcome:
        folder = tmp_path_factory.mktemp("together") / "run"
        return outcome(folder, folders, DIVERGENCES[name], ["actor", "teacher"], slots=(1,), rows=rows)

    return made


@pytest.mark.parametrize("name", FEW_DIVERGENCES)
def test_a_teacher_of_another_size_may_have_its_own_pool(
    name: str, folders: Mapping[Role, str], rows: str, together: Together, tmp_path: Path
) -> None:
    apart = outcome(tmp_path / "run", folders, DIVERGENCES[name], ["actor"], ["teacher"], slots=(1, 2), rows=rows)
    assert (together(name).processes, apart.processes) == (1, 3)
    compare(apart, together(name))


@pytest.mark.parametrize("name", FEW_DIVERGENCES)
def test_a_teacher_on_a_server_teaches_as_its_model_does(
    name: str, folders: Mapping[Role, str], rows: str, together: Together, tmp_path: Path
) -> None:
    with teaching(folders["teacher"]) as (asked, url):
        servers = {"it": url}
        outside = outcome(
            tmp_path / "run", folders, DIVERGENCES[name], ["actor"], slots=(2,), servers=servers, rows=rows
        )
    assert len(asked.asked) == STEPS * 8
    compare(outside, together(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_column_names_the_teacher_of_each_row(
    name: str, folders: Mapping[Role, str], rows: str, together: Together, tmp_path: Path
) -> None:
    """All three teachers are one model, so the steps are those of one teacher; the servers see their own rows only."""
    options = {**DIVERGENCES[name], "teacherKey": "domain"}
    with ExitStack() as stack:
        servers = {domain: stack.enter_context(teaching(folders["teacher"])) for domain in DOMAINS[:-1]}
        urls = {domain: url for domain, (_, url) in servers.items()}
        several = outcome(tmp_path / "run", folders, options, ["actor", "teacher"], slots=(2,), servers=urls, rows=rows)
    for domain, (asked, _) in servers.items():
        texts = [asked.tokenizer.decode(each) for each in asked.asked]
        assert texts
        assert all(text.startswith(f"{domain}: ") for text in texts), texts
    compare(several, together(name))
