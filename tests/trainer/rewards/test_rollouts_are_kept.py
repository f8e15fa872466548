"""Responses are kept as texts with all that was found about them: the same ones on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_api.job import Job
from rlhf_trainer.run.step_models import step_models_of
from rlhf_trainer.run.worker_specs import model_spec
from rlhf_trainer.workers.responses import RolloutKeeper
from rlhf_trainer.workers.samples import as_bytes, from_bytes
from tests.trainer.chain.mistakes import FUNCTIONS
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.rewards.test_rewards_of_every_form_are_scored_by_workers import (
    LENGTHS,
    PROMPT,
    ROWS,
    WIDTH,
    batch_here,
    job_with,
    setting,
    with_columns,
)
from tests.trainer.tiny import save_tiny

SUM = (
    f"models.reward={{sum: [{{name: one, reward: {{{LENGTHS}}}}}, "
    f"{{name: two, weight: 2, reward: {{{LENGTHS}, arguments: {{scale: 3}}}}}}]}}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rollouts")
    for name, labels in {"language": None, "reward": 1}.items():
        save_tiny(made / "models" / name, seed=1, labels=labels)
    return made


def keep(job: Job, folder: Path, file: str, steps: int) -> None:
    """Keep the responses of some steps; the last row is padding."""
    keeper = RolloutKeeper(setting(job, folder, "actor"), file=file)
    scorer = model_spec(setting(job, folder, "actor"), "reward").build()
    for step in range(1, steps + 1):
        batch = with_columns(batch_here(step))
        batch = batch.with_fields({"response_mask": batch["response_mask"] * batch["valid"][:, None]})
        batch = batch.with_fields(scorer.compute_reward(batch))
        advantages = batch["response_mask"] * (batch.rows[:, None] - 1.5)
        versions = torch.full_like(advantages, step - 1.0)
        keeper.keep(batch.with_fields({"advantages": advantages, "policy_version": versions}))


def kept(folder: Path, share: float, *, ranks: int, steps: int = 1, reward: str = SUM) -> list[dict[str, Any]]:
    job, file = job_with(folder, reward, f"rollout.keep={share}"), folder / f"rollouts-{ranks}-{share}-{steps}.jsonl"
    run_kept_ranks(ranks, keep, job, folder, str(file), steps)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(rows, key=lambda row: (row["step"], row["row"]))  # ranks write when they come to it


def test_a_line_says_all_of_a_response(folder: Path) -> None:
    rows = kept(folder, 1.0, ranks=2)
    assert [row["row"] for row in rows] == [0, 1, 2, 3], "padding is left out"
    row = rows[1]
    assert row["reward_parts"]["two"] == 3 * row["reward_parts"]["one"]
    assert row["reward"] == 7 * row["reward_parts"]["one"]
    assert row["reward_parts"]["one"] == len(row["prompt"]) + len(row["response"]) + row["finished"]
    names = ("step", "advantage", "columns", "finished", "prompt_tokens", "response_tokens", "policy_version")
    assert [row[name] for name in names] == [1, -0.5, {"size": 1, "more": "x"}, False, PROMPT, WIDTH - PROMPT, 0]


def test_named_parts_are_kept_and_no_response_without_a_score(folder: Path) -> None:
    rows = kept(folder, 1.0, ranks=1, reward=f"models.reward={{entrypoint: '{FUNCTIONS}:every_other'}}")
    assert [(row["row"], row["reward_parts"]) for row in rows] == [(1, {"size": 3.0}), (3, {"size": 3.0})]


def test_the_same_share_is_kept_on_any_number_of_ranks(folder: Path) -> None:
    rows = kept(folder, 0.5, ranks=1, steps=20)
    assert rows == kept(folder, 0.5, ranks=2, steps=20)
    assert 0.3 < len(rows) / (20 * (ROWS - 1)) < 0.7


def test_an_unfinished_line_takes_no_other_with_it(folder: Path) -> None:
    job, file = job_with(folder, SUM, "rollout.keep=1.0"), folder / "torn.jsonl"
    file.write_text('{"step": 1, "row": 0, "prom')
    run_kept_ranks(1, keep, job, folder, str(file), 1)
    torn, *whole = file.read_text().splitlines()
    assert (torn, [json.loads(line)["row"] for line in whole]) == ('{"step": 1, "row": 0, "prom', [0, 1, 2, 3])


def keep_mismatched(job: Job, folder: Path, file: str) -> None:
    """Keep the rows of a step whose generator and trainer differ more, the later the row and the token."""
    batch = with_columns(batch_here(1))
    mask = batch["response_mask"] * batch["valid"][:, None]
    trainers = torch.full_like(mask, -1.0)
    far = torch.arange(WIDTH) + WIDTH * batch.rows[:, None].float()
    fields = {
        "response_mask": mask,
        "old_log_probs": trainers,
        "rollout_log_probs": torch.where(mask > 0, trainers - 0.01 * far, 99.0),
    }
    scored = batch.with_fields({**fields, "scores": batch["valid"], "policy_version": mask})
    RolloutKeeper(setting(job, folder, "actor"), file=file).keep(scored)


def test_the_worst_tokens_of_a_step_are_told_with_their_rows(folder: Path) -> None:
    job = job_with(folder, SUM, "rollout.keep=1e-9")
    found = []
    for ranks in (1, 2):
        file = folder / f"worst-{ranks}.jsonl"
        run_kept_ranks(ranks, keep_mismatched, job, folder, str(file))
        found.append(sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda row: row["row"]))
    one, other = found
    assert one == other, "the rows are the same on any number of ranks"
    tokens = [each for row in reversed(one) for each in row["worst_tokens"]]
    assert len(tokens) == 10, "of all rows together, though no prompt is in the kept share"
    assert one[-1]["row"] == ROWS - 2, "the last row that is not padding"
    assert [each["position"] for each in one[-1]["worst_tokens"]] == list(range(WIDTH - PROMPT))[::-1][:10]
    gaps = [each["log_prob"] - each["generator_log_prob"] for each in tokens]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] == pytest.approx(0.01 * (WIDTH * (ROWS - 1) - 1), rel=1e-3)
    assert all(each["token"] for each in tokens)


def test_a_job_that_keeps_none_has_no_more_calls(folder: Path) -> None:
    plain, keeping = job_with(folder, SUM), job_with(folder, SUM, "rollout.keep=0.1")
    added = [
        model_spec(setting(each, folder, "actor"), "reward").transfers["compute_reward"].adds
        for each in (plain, keeping)
    ]
    assert added == [("scores", "valid", "response_mask"), ("scores", "valid", "response_mask", "reward_parts")]
    models = {name: object() for name in ("actor", "critic", "reference", "reward", "advantage")}
    assert step_models_of(job_with(folder), models)["actor"] is models["actor"]


def test_the_actor_learns_after_its_responses_are_kept(folder: Path) -> None:
    calls: list[str] = []

    class Called:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, method: str) -> Any:
            return lambda batch: calls.append(f"{self._name}.{method}({batch})")

    names = ("actor", "critic", "reference", "reward", "advantage", "rollouts")
    actor = step_models_of(job_with(folder), {name: Called(name) for name in names})["actor"]
    actor.compute_log_prob("a")
    actor.update_actor("b")
    assert calls == ["actor.compute_log_prob(a)", "rollouts.keep(b)", "actor.update_actor(b)"]


def test_texts_of_any_length_travel_as_bytes() -> None:
    rows: list[dict[str, Any]] = [{"a": "\u00e9\u4e2d"}, {}, {"b": [1.5, None, True]}]
    table = as_bytes(rows)
    assert table.dtype == torch.uint8
    assert [from_bytes(row) for row in table] == rows
    assert as_bytes([]).shape == (0, 0)
