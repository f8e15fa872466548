"""Passes that a step can do without: of old log-probabilities before its only update, and of a reference without KL."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.files import load
from rlhf_mapper.workload import workload_of
from rlhf_trainer.telemetry import Report, merge
from rlhf_trainer.workers import generating_actor
from rlhf_trainer.workers.base import log_probs_by
from tests.examples.test_every_example_is_right import EXAMPLES, FINISHED
from tests.trainer.measured import SHARED
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import save_tiny
from tests.trainer.training.test_every_algorithm_takes_a_step import steps

GRPO, DAPO = (next(path for path in EXAMPLES if name in path.name) for name in ("02-", "06-"))
ONE_UPDATE = "training.miniBatchSize=64"
TRUNCATED = "algorithm.rolloutCorrection={mode: Truncate, cap: 1.5}"


def passes(path: Path, name: str, folders: dict[Any, str], overrides: Sequence[str]) -> tuple[list[Report], int]:
    """What two steps measured, and how often this rank computed old log-probabilities in a pass of their own."""
    counted: list[int] = []

    def counting(*given: Any, **options: Any) -> Any:
        counted.append(1)
        return log_probs_by(*given, **options)

    setattr(generating_actor, "log_probs_by", counting)  # noqa: B010
    try:
        return steps(path, name, folders, overrides)[0], len(counted)
    finally:
        setattr(generating_actor, "log_probs_by", log_probs_by)  # noqa: B010


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, str]:
    """Folders of the models by role."""
    root = tmp_path_factory.mktemp("models")
    language, scorer = save_tiny(root / "language", seed=3), save_tiny(root / "scorer", seed=4, labels=1)
    return {"actor": language, "reference": language, "critic": scorer, "reward": scorer}


def measured(
    path: Path, name: str, folders: dict[Any, str], overrides: Sequence[str] = (), *, ranks: int = 2
) -> tuple[list[dict[str, float]], int, set[str]]:
    """The records of two steps, the passes of a rank, and the keys of the warnings."""
    found = run_kept_ranks(ranks, passes, path, name, folders, list(overrides))
    records = [merge(reports) for reports in zip(*(reports for reports, _ in found), strict=True)]
    warnings = {key for reports, _ in found for report in reports for key in report.warnings}
    return records, found[0][1], warnings


def assert_same(found: dict[str, float], expected: dict[str, float], *, without: Sequence[str] = ()) -> None:
    names = {name for name in found.keys() | expected.keys() if not name.startswith(SHARED)}
    for name in names - set(without):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="plain"),
        pytest.param((TRUNCATED,), id="with weights of the generator's error", marks=pytest.mark.slow),
    ],
)
def test_a_steps_only_update_finds_the_old_log_probs(folders: dict[Any, str], overrides: tuple[str, ...]) -> None:
    overrides = (ONE_UPDATE, *overrides)
    (first, second), count, warned = measured(GRPO, "helpful-grpo", folders, overrides)
    recompute = [*overrides, "training.oldLogProbs=Recompute"]
    (first_by_pass, second_by_pass), count_by_pass, warned_by_pass = measured(GRPO, "helpful-grpo", folders, recompute)
    assert (count, count_by_pass) == (0, 2)
    assert "kl/reference" in first
    assert first.pop("ratio/first_max_deviation", None) is None
    for one, other in ((first, first_by_pass), (second, second_by_pass)):
        assert_same(one, other, without=["ratio/first_max_deviation"])
    assert warned == warned_by_pass == {"kl/rollout"}, "the stand-in makes its log-probabilities up"


def test_several_updates_and_a_penalty_in_the_reward_need_a_pass(folders: dict[Any, str]) -> None:
    assert measured(GRPO, "helpful-grpo", folders)[1] == 2
    in_reward = [ONE_UPDATE, "algorithm.kl.applyTo=Reward"]
    assert measured(GRPO, "helpful-grpo", folders, in_reward)[1] == 2


@pytest.mark.slow
def test_a_gate_and_a_mean_of_weights_need_a_pass(folders: dict[Any, str]) -> None:
    gate = "watch.mismatch={{kl: {}, action: SkipUpdate}}"
    (shut, _), count, _ = measured(GRPO, "helpful-grpo", folders, [ONE_UPDATE, gate.format(1e-6)])
    assert (count, shut["skipped_updates/mismatch"]) == (2, 1.0)
    assert not any(name.startswith(("grad_norm/", "loss/")) for name in shut), "the actor is not updated"
    (open_, _), _, _ = measured(GRPO, "helpful-grpo", folders, [ONE_UPDATE, gate.format(1e6)])
    assert open_["skipped_updates/mismatch"] == 0.0
    assert open_["grad_norm/policy"] > 0.0
    normalized = [ONE_UPDATE, "algorithm.rolloutCorrection={high: 1.5, normalize: true}"]
    assert measured(GRPO, "helpful-grpo", folders, normalized)[1] == 2


def test_the_mismatch_is_measured_by_estimator_and_by_quarter(folders: dict[Any, str]) -> None:
    (record, _), _, _ = measured(GRPO, "helpful-grpo", folders, [TRUNCATED])
    quarters = [record[f"kl_rollout_quarter/{number}"] for number in (1, 2, 3, 4)]
    assert min(quarters) < record["kl/rollout"] < max(quarters)
    assert 0.0 < record["kl/rollout_k2"] != record["kl/rollout"]
    assert record["correction/vetoed"] == 0.0
    assert 0.0 < record["correction/weight"] ** 2 <= record["correction/squared_weight"]


def test_the_generators_log_probs_are_taken_where_asked(folders: dict[Any, str]) -> None:
    overrides = ["training.oldLogProbs=Generator", "algorithm.kl.applyTo=Reward"]
    (first, _), count, warned = measured(GRPO, "helpful-grpo", folders, overrides)
    assert count == 0
    assert warned == {"kl/rollout"}, "the stand-in makes them up, and that is seen"
    assert first["kl/rollout"] > 1e-3
    (by_pass, _), _, _ = measured(GRPO, "helpful-grpo", folders, ["algorithm.kl.applyTo=Reward"])
    assert first["kl/reference"] != pytest.approx(by_pass["kl/reference"], rel=1e-2)


def test_without_a_penalty_there_is_no_unnamed_reference(folders: dict[Any, str]) -> None:
    named = ["models.reference={uri: 'job://helpful-sft'}"]
    alone, compared = (
        next(job for job in load(DAPO, overrides, FINISHED) if job.name == "helpful-dapo") for overrides in ([], named)
    )
    assert "reference" not in alone.models()
    assert "reference" in compared.models()
    (first, second), _, _ = measured(DAPO, "helpful-dapo", folders)
    records, _, _ = measured(DAPO, "helpful-dapo", folders, named)
    assert "kl/reference" not in first
    assert "kl/reference" in records[0]
    for one, other in zip((first, second), records, strict=True):
        assert_same(one, other, without=["kl/reference"])


def test_a_step_counts_the_tokens_it_computes_and_shares(folders: dict[Any, str]) -> None:

    def computed(*overrides: str) -> tuple[float, float]:
        found: list[tuple[list[Report], int]] = run_kept_ranks(
            2, passes, GRPO, "helpful-grpo", folders, list(overrides)
        )
        record = merge(report for reports, _ in found for report in reports)
        return record["computed_tokens"], record["shared_tokens"]

    tokens, shared = computed()
    whole, none = computed("training.sharePrompts=false")
    assert none == 0.0
    assert shared == pytest.approx(1.0 - tokens / whole)
    assert tokens < 0.8 * whole


def test_prompts_not_learned_from_need_no_update() -> None:
    (job,) = load(DAPO, [ONE_UPDATE], FINISHED)
    assert (job.sequences_per_step, job.updates_per_step, job.old_log_probs_by_update) == (128, 1, True)


def test_the_mapper_counts_the_passes_that_are_made() -> None:
    def read(*overrides: str) -> float:
        job = next(job for job in load(GRPO, overrides, FINISHED) if job.name == "helpful-grpo")
        return workload_of(job).work["actor"].read

    assert (read(), read(ONE_UPDATE), read("training.oldLogProbs=Generator")) == (64, 0, 0)
