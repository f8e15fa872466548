"""Each algorithm's advantages: by hand, and the same however the rows of a group are cut over ranks and padded."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import PolicyGradient
from rlhf_trainer.protocols import blocks
from rlhf_trainer.telemetry import Report, merge, recorder
from rlhf_trainer.types import Batch, transfers_of
from rlhf_trainer.workers.advantage import AdvantageWorker
from tests.trainer.jobs import job
from tests.trainer.ranks import run_kept_ranks

ROWS, GROUP, T = 9, 3, 4
SCORES = torch.tensor([1.0, 3.0, 5.0, 2.0, 2.0, 2.0, 0.0, 0.0, 6.0])
GREEDY = torch.tensor([1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 4.0, 4.0, 4.0])
NO_KL = {"coefficient": 0.0, "applyTo": "Reward"}


def batch(extra: int) -> dict[str, Tensor]:
    """Nine responses to three prompts: one of prompt and 1 to 3 of response; `extra` columns of padding."""
    lengths = torch.tensor([1, 2, 3, 3, 1, 2, 2, 3, 1])
    mask = ((torch.arange(T) >= 1) & (torch.arange(T) <= lengths[:, None])).float()
    generator = torch.Generator().manual_seed(1)
    noise = {
        name: torch.randn(ROWS, T, generator=generator) * mask for name in ("ref_log_probs", "values", "cost_values")
    }
    fields = {
        "scores": SCORES,
        "costs": torch.arange(ROWS) - 4.0,
        "finished": torch.tensor([1.0] * 8 + [0.0]),
        "valid": torch.ones(ROWS),
        "response_mask": mask,
        "old_log_probs": torch.zeros(ROWS, T),
        **noise,
        "greedy_scores": GREEDY,
        "greedy_finished": torch.ones(ROWS),
        "greedy_response_mask": mask.flip(0),
        "greedy_valid": torch.ones(ROWS),
    }
    return {name: pad(field, (0, extra)) if field.dim() > 1 else field for name, field in fields.items()}


def compute(
    folder: str, algorithm: dict[str, Any], extra: int, more: int = 0, changes: dict[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], Report]:
    """The advantages of this rank's rows, of the fields their calls say they read; `more` prompts that are padding."""
    import torch.distributed as dist

    roles = [*ALGORITHMS[algorithm["name"]].trained, *ALGORITHMS[algorithm["name"]].frozen]
    spec = {
        "algorithm": algorithm,
        "models": {role: {"uri": "hf://x"} for role in roles},
        "data": {"train": {"uri": "hf://x"}, "maxResponseTokens": 3},
        "rollout": {"samplesPerPrompt": GROUP},
        "training": {"totalSteps": 1, "promptBatchSize": 1 if "oversampling" in algorithm else 3},
    }
    made = job(Path(folder), f"job-{dist.get_rank()}", spec)
    worker = AdvantageWorker(made)
    all_fields = with_padding_rows(batch(extra) | (changes or {}), more * GROUP)
    rows = blocks(ROWS + more * GROUP, dist.get_world_size())[dist.get_rank()]
    here = {name: field[rows.start : rows.stop] for name, field in all_fields.items()}
    recorder.drain()
    found: dict[str, Tensor] = {}
    for method, transfer in sorted(
        transfers_of(type(worker), {"job": made}).items(), reverse=True
    ):  # rewards before advantages
        if transfer.adds:
            fields = {name: here[name] for name in transfer.fields_read(here)}
            found = getattr(worker, method)(Batch(step=1, start=rows.start, size=len(rows), fields=fields))
            here |= found
    return found, recorder.drain()


def with_padding_rows(fields: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """With rows that stand where a short last batch has none: scored, but without a response, and valid 0."""
    junk = {"scores": 7.0, "costs": 9.0, "greedy_scores": -5.0, "finished": 1.0, "greedy_finished": 1.0}
    return {
        name: torch.cat([field, torch.full((count, *field.shape[1:]), junk.get(name, 0.0))])
        for name, field in fields.items()
    }


def advantages(
    folder: Path, algorithm: dict[str, Any], *, ranks: int = 1, extra: int = 0, more: int = 0
) -> tuple[Tensor, Any]:
    results = run_kept_ranks(ranks, compute, str(folder), algorithm, extra, more)
    whole = torch.cat([fields["advantages"] for fields, _ in results])
    return whole[:ROWS, :T], merge(report for _, report in results)


CASES: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name, each in ALGORITHMS.items() if issubclass(each, PolicyGradient)},
    "SafeRLHF": {"name": "SafeRLHF", "costLimit": -1.0},
    "SafeRLHF with one critic": {"name": "SafeRLHF", "separateCostCritic": False},
    "GRPO, KL in the reward": {"name": "GRPO", "kl": {"applyTo": "Reward"}},
    "Dr. GRPO": {"name": "GRPO", "normalizeByStd": False},
    "DAPO": {"name": "GRPO", "oversampling": 3, "rewards": {"overlongPenalty": {"bufferTokens": 2}}},
    "ReMax": {"name": "ReMax", "rewards": {"normalization": "Running", "missingEndPenalty": 1.0}},
    "REINFORCE++ with a baseline": {"name": "REINFORCEPP", "baseline": "Group"},
}
"""Each algorithm with its defaults, and what options change."""


@pytest.mark.parametrize("name", CASES)
def test_any_cut_and_any_padding_give_the_same_advantages(name: str, tmp_path: Path) -> None:
    expected, record = advantages(tmp_path, CASES[name])
    assert expected.abs().max() > 0.1
    for ranks, extra, more in ((2, 0, 0), (4, 3, 0), (2, 0, 1)):  # the first two cut across groups of 3
        found, other = advantages(tmp_path, CASES[name], ranks=ranks, extra=extra, more=more)
        tolerance = 0.0 if name in ("GRPO", "Dr. GRPO", "DAPO") else 1e-5  # else sums over tokens round
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert other == pytest.approx(record, rel=1e-5, abs=1e-6)


def without_a_score(row: int, score: float) -> dict[str, Tensor]:
    """Fields in which the reward gave no score to a response, whatever number stands there."""
    kept = (torch.arange(ROWS) != row).float()
    scores = torch.where(kept > 0, SCORES, score)
    return {"scores": scores, "valid": kept, "response_mask": batch(0)["response_mask"] * kept[:, None]}


@pytest.mark.parametrize("name", CASES)
def test_a_response_without_a_score_is_left_out(name: str, tmp_path: Path) -> None:
    outcomes = [
        run_kept_ranks(ranks, compute, str(tmp_path), CASES[name], 0, 0, without_a_score(4, score))
        for ranks, score in ((1, 0.0), (1, 100.0), (2, 100.0))
    ]
    first, *others = [torch.cat([fields["advantages"] for fields, _ in parts]) for parts in outcomes]
    assert first.isfinite().all()
    assert not first[4].any()
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-5)


def test_remax_leaves_out_what_there_is_no_greedy_score_for(tmp_path: Path) -> None:
    changes = {"greedy_valid": (torch.arange(ROWS) != 2).float()}
    ((found, _),) = run_kept_ranks(1, compute, str(tmp_path), {"name": "ReMax", "kl": NO_KL}, 0, 0, changes)
    assert (found["response_mask"].sum(1) > 0).tolist() == [True] * 2 + [False] + [True] * 6
    assert first_token(found["advantages"]) == [0.0, 2.0, 0.0, -1.0, -1.0, -1.0, -4.0, -4.0, 2.0]


def first_token(found: Tensor) -> list[float]:
    return [round(value, 4) for value in found[:, 1].tolist()]


def test_grpo_by_hand(tmp_path: Path) -> None:
    found, record = advantages(tmp_path, {"name": "GRPO"})
    third = 2 / math.sqrt(12)  # (0, 0, 6): mean 2, deviation sqrt((4 + 4 + 16) / 2)
    expected = [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0, -third, -third, 2 * third]
    assert first_token(found) == pytest.approx(expected, abs=1e-4)
    assert record["groups/with_signal"] == pytest.approx(2 / 3)


def test_dr_grpo_only_centres(tmp_path: Path) -> None:
    found, _ = advantages(tmp_path, {"name": "GRPO", "normalizeByStd": False})
    assert first_token(found) == [-2.0, 0.0, 2.0, 0.0, 0.0, 0.0, -2.0, -2.0, 4.0]


def test_dapo_trains_on_the_first_prompts_with_a_signal(tmp_path: Path) -> None:
    results = run_kept_ranks(2, compute, str(tmp_path), {"name": "GRPO", "oversampling": 3}, 0)
    masks = torch.cat([fields["response_mask"] for fields, _ in results])
    assert (masks.sum(1) > 0).tolist() == [True] * 3 + [False] * 6
    torch.testing.assert_close(masks[:3], batch(0)["response_mask"][:3])


def test_ppo_by_hand(tmp_path: Path) -> None:
    """Lambda 1 of GAE: what comes in the end less the value of each token."""
    found, _ = advantages(tmp_path, {"name": "PPO", "kl": NO_KL, "gaeLambda": 1.0, "whitenAdvantages": False})
    fields = batch(0)
    torch.testing.assert_close(found, (SCORES[:, None] - fields["values"]) * fields["response_mask"])


def test_rloo_by_hand(tmp_path: Path) -> None:
    found, _ = advantages(tmp_path, {"name": "RLOO", "kl": NO_KL})
    assert first_token(found) == [-3.0, 0.0, 3.0, 0.0, 0.0, 0.0, -3.0, -3.0, 6.0]


def test_remax_subtracts_the_greedy_score_by_hand(tmp_path: Path) -> None:
    found, record = advantages(tmp_path, {"name": "ReMax", "kl": NO_KL})
    assert first_token(found) == [0.0, 2.0, 4.0, -1.0, -1.0, -1.0, -4.0, -4.0, 2.0]
    assert record["reward/greedy"] == pytest.approx(8 / 3)


def test_the_greedy_score_is_shaped_like_the_others(tmp_path: Path) -> None:
    shaping = {"clip": 2.0, "missingEndPenalty": 10.0}
    found, _ = advantages(tmp_path, {"name": "ReMax", "kl": NO_KL, "rewards": shaping})
    assert first_token(found) == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0, -2.0, -2.0, -10.0]


def test_a_response_that_is_nearly_too_long_loses_reward(tmp_path: Path) -> None:
    """3 tokens at most, the last 2 of them penalised: lengths 1, 2 and 3 lose 0, 0.5 and 1 time the coefficient."""
    shaping = {"overlongPenalty": {"bufferTokens": 2, "coefficient": 4.0}}
    found, _ = advantages(tmp_path, {"name": "GRPO", "normalizeByStd": False, "rewards": shaping})
    assert first_token(found)[:3] == [0.0, 0.0, 0.0]  # scores 1, 3, 5 less 0, 2, 4
    assert first_token(found)[3:6] == [-2.0, 2.0, 0.0]  # scores 2, 2, 2 less 4, 0, 2


def test_a_prompt_has_a_signal_by_its_scores_alone(tmp_path: Path) -> None:
    """Neither the KL in the reward nor a penalty makes responses of one score worth learning from."""
    algorithm = {
        "name": "GRPO",
        "oversampling": 3,
        "kl": {"applyTo": "Reward"},
        "rewards": {"overlongPenalty": {"bufferTokens": 2}},
    }
    _, record = advantages(tmp_path, algorithm)
    assert record["groups/with_signal"] == pytest.approx(2 / 3)


def test_the_kl_penalty_counts_from_its_token_on(tmp_path: Path) -> None:
    found, _ = advantages(tmp_path, {"name": "ReMax", "kl": {"coefficient": 0.5}})
    reference, mask = batch(0)["ref_log_probs"], batch(0)["response_mask"]
    penalty = 0.5 * -reference[2]  # the old log-probabilities are 0, so K1 is minus the reference's
    to_go = [float(penalty[t:].sum()) for t in (1, 2, 3)]
    assert found[2, 1:].tolist() == pytest.approx([5.0 - 1.0 - each for each in to_go], rel=1e-5)
    assert mask[2].tolist() == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("baseline", ["None", "Group"])
def test_reinforce_pp_normalises_over_the_batch_by_hand(baseline: str, tmp_path: Path) -> None:
    found, _ = advantages(tmp_path, {"name": "REINFORCEPP", "kl": NO_KL, "baseline": baseline})
    mask = batch(0)["response_mask"] > 0
    means = torch.tensor([3.0] * 3 + [2.0] * 6) if baseline == "Group" else torch.zeros(ROWS)
    raw = (SCORES - means)[:, None].expand(ROWS, T)[mask]
    torch.testing.assert_close(found[mask], (raw - raw.mean()) / raw.std(correction=0))
    assert found[~mask].abs().max() == 0.0


def test_the_baseline_of_reinforce_pp_knows_no_kl(tmp_path: Path) -> None:
    algorithm = {"name": "REINFORCEPP", "baseline": "Group", "kl": {"coefficient": 0.5}}
    found, _ = advantages(tmp_path, algorithm)
    fields = batch(0)
    mask = fields["response_mask"] > 0
    penalty = (0.5 * -fields["ref_log_probs"]).flip(1).cumsum(1).flip(1)
    raw = ((SCORES - torch.tensor([3.0] * 3 + [2.0] * 6))[:, None] - penalty)[mask]
    torch.testing.assert_close(found[mask], (raw - raw.mean()) / raw.std(correction=0))


SAFE = {
    "name": "SafeRLHF",
    "whitenAdvantages": False,
    "kl": NO_KL,
    "costLimit": -1.0,
    "lagrange": {"initial": 2.0, "learningRate": 0.25},
}
MULTIPLIER = 2.0 * math.exp(0.25 * 2.0 * 1.0)
"""The costs -4 to 4 have mean 0, which is 1 above the limit."""


def test_the_multiplier_waits_for_the_actor(tmp_path: Path) -> None:
    _, record = advantages(tmp_path, {**SAFE, "criticWarmupSteps": 1})
    assert record["lagrange/multiplier"] == 2.0


@pytest.mark.parametrize("separate", [True, False])
def test_safe_rlhf_weighs_the_cost_by_the_multiplier_by_hand(separate: bool, tmp_path: Path) -> None:
    """Lambda 1 of GAE: what comes in the end less the values, each critic's own or those of the one critic."""
    algorithm = {**SAFE, "gaeLambda": 1.0, "separateCostCritic": separate}
    found, record = advantages(tmp_path, algorithm)
    assert record["lagrange/multiplier"] == pytest.approx(MULTIPLIER)
    assert record["cost/mean"] == 0.0
    fields = batch(0)
    reward, cost = SCORES[:, None], fields["costs"][:, None]
    if separate:
        mixed = (reward - fields["values"]) - MULTIPLIER * (cost - fields["cost_values"])
        expected = mixed / (1 + MULTIPLIER)
    else:
        expected = (reward - MULTIPLIER * cost) / (1 + MULTIPLIER) - fields["values"]
    torch.testing.assert_close(found, expected * fields["response_mask"])


def test_the_kl_penalty_weighs_the_same_whatever_the_multiplier(tmp_path: Path) -> None:
    without, _ = advantages(tmp_path, {**SAFE, "gaeLambda": 1.0})
    with_kl, _ = advantages(tmp_path, {**SAFE, "gaeLambda": 1.0, "kl": {"coefficient": 0.5}})
    penalty = -0.5 * batch(0)["ref_log_probs"]
    to_go = penalty.flip(1).cumsum(1).flip(1) * batch(0)["response_mask"]
    torch.testing.assert_close(with_kl, without - to_go)


def resumed(folder: str) -> tuple[Any, Any]:
    """The counters after a step, and those of a worker that goes back to them."""
    spec = {
        "algorithm": {**SAFE, "rewards": {"normalization": "Running"}},
        "models": {role: {"uri": "hf://x"} for role in ("actor", "critic", "reward", "cost")},
        "data": {"train": {"uri": "hf://x"}},
        "training": {"totalSteps": 1, "promptBatchSize": ROWS},
    }
    made = job(Path(folder), "job", spec)
    first, second = (AdvantageWorker(made) for _ in range(2))
    first.compute_rewards(Batch(step=1, start=0, size=ROWS, fields=batch(0)))
    second.set_counters(counters=json.loads(json.dumps(first.counters())))
    return first.counters(), second.counters()


def test_the_multiplier_survives_a_checkpoint(tmp_path: Path) -> None:
    ((before, after),) = run_kept_ranks(1, resumed, str(tmp_path))
    assert before == after
    assert after["multiplier"] == pytest.approx(MULTIPLIER)
    assert after["reward_moments"]["count"] == ROWS
