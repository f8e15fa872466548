"""KTO (arXiv:2402.01306): its loss by numpy, and its steps with a tiny model from known log-ratios."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_trainer.algorithms.kto import KTO
from rlhf_trainer.protocols import blocks
from rlhf_trainer.telemetry import Report, merge, recorder
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.preference import LabelledActorWorker
from rlhf_trainer.workers.reference import ReferenceWorker
from tests.trainer.jobs import job
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import save_tiny

DATA = {"train": {"uri": "package://rlhf_examples/helpful/safety_train.jsonl"}}
MASK = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]]).repeat(2, 1)
RESPONSE = MASK * torch.tensor([0.0, 1.0, 1.0, 1.0])
DESIRABLE = torch.tensor([1.0, 0.0, 1.0, 1.0])
VALID = torch.tensor([1.0, 1.0, 1.0, 0.0])


def test_the_loss_is_that_of_the_paper() -> None:
    draws = np.random.default_rng(0)
    ratios, desirable = draws.normal(0.0, 30.0, 64), draws.integers(0, 2, 64)
    point, beta, good, bad = 2.5, 0.2, 1.5, 0.75
    value = np.where(
        desirable == 1,
        good / (1.0 + np.exp(-beta * (ratios - point))),
        bad / (1.0 + np.exp(-beta * (point - ratios))),
    )
    algorithm = KTO(name="KTO", beta=beta, desirable_weight=good, undesirable_weight=bad)
    given = [torch.tensor(each, dtype=torch.float64) for each in (ratios, desirable, np.full(64, point))]
    expected = np.where(desirable == 1, good, bad) - value
    np.testing.assert_allclose(algorithm.losses(*given).numpy(), expected, rtol=0, atol=1e-6)


def steps(folder: str, shifts: Sequence[float], other: Sequence[float], updates: int) -> tuple[Report, list[float]]:
    """Return the measures of the first of some updates, and the held-out losses; the last of four rows is padding.

    shifts, other: log-ratios to the reference of the rows' own responses, and of the mismatched ones, to begin with.
    """
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    spec = {
        "algorithm": {"name": "KTO", "desirableWeight": 2.0},
        "models": {"actor": {"uri": f"file://{folder}", "optimizer": {"learningRate": 1e-2}}},
        "data": DATA,
        "training": {"totalSteps": 8, "batchSize": 4},
    }
    made = job(Path(folder), f"job-{rank}", spec)
    settings = {
        role: WorkerSetting(job=made, role=role, model=model, folder=folder, total_steps=8)
        for role, model in made.models().items()
    }
    actor, reference = LabelledActorWorker(settings["actor"]), ReferenceWorker(settings["reference"])
    texts = {
        "tokens": torch.arange(3, 19).reshape(4, 4),
        "attention_mask": MASK,
        "response_mask": RESPONSE * VALID[:, None],
    }
    names = ("mismatched_tokens", "mismatched_mask", "mismatched_response_mask")
    fields = {**texts, **dict(zip(names, (each.roll(1, 0) for each in texts.values()), strict=True))}
    fields |= {"valid": VALID, "desirable": DESIRABLE}
    rows = blocks(4, world)[rank]
    here = {name: field[rows.start : rows.stop] for name, field in fields.items()}
    batch = Batch(step=1, start=rows.start, size=len(rows), fields=here)
    batch = batch.with_fields(reference.compute_log_prob(batch))
    batch = batch.with_fields(reference.compute_mismatched_log_prob(batch))
    first = (torch.arange(4) == 1) * torch.tensor(shifts)[rows.start : rows.stop, None]
    shifted = {
        "ref_log_probs": batch["ref_log_probs"] - first,
        "ref_mismatched": batch["ref_mismatched"] - torch.tensor(other)[rows.start : rows.stop],
    }
    batch = batch.with_fields(shifted)
    batch = batch.with_fields(actor.compute_reference_point(batch))
    losses = [actor.evaluate_completions(batch)[0]]
    recorder.drain()
    actor.update_actor(batch)
    measured = recorder.drain()
    for _ in range(updates - 1):
        actor.update_actor(batch.with_fields(actor.compute_reference_point(batch)))
    return measured, [*losses, actor.evaluate_completions(batch)[0]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_by_hand(ranks: int, tmp_path: Path) -> None:
    """The actor is the reference, so its log-ratios are the shifts; z0 is the mean of 4, -1 and 3."""
    folder = save_tiny(tmp_path / "model", seed=3)
    results = run_kept_ranks(ranks, steps, folder, [3.0, -2.0, 1.0, 50.0], [4.0, -1.0, 3.0, 50.0], 1)
    record = merge(report for report, _ in results)
    losses = [
        2.0 - 2.0 / (1.0 + math.exp(-0.1 * (3.0 - 2.0))),
        1.0 - 1.0 / (1.0 + math.exp(-0.1 * (2.0 + 2.0))),
        2.0 - 2.0 / (1.0 + math.exp(-0.1 * (1.0 - 2.0))),
    ]
    assert record["kl/mismatched"] == pytest.approx(2.0, abs=1e-5)
    assert record["loss/kto"] == pytest.approx(sum(losses) / 3, abs=1e-6)
    assert record["implicit_reward/desirable"] == pytest.approx(0.1 * 2.0, abs=1e-6)
    assert record["implicit_reward/undesirable"] == pytest.approx(0.1 * -2.0, abs=1e-6)
    assert record["margin/labels"] == pytest.approx(0.1 * 4.0, abs=1e-6)
    assert sum(before for _, (before, _) in results) == pytest.approx(sum(losses), abs=1e-5)


def test_the_reference_point_is_at_least_0(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", seed=3)
    ((report, _),) = run_kept_ranks(1, steps, folder, [0.0] * 4, [-4.0] * 4, 1)
    assert merge([report])["kl/mismatched"] == 0.0


def test_updates_tell_desirable_from_undesirable(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", seed=3)
    ((_, (before, after)),) = run_kept_ranks(1, steps, folder, [0.0] * 4, [0.0] * 4, 5)
    assert before == pytest.approx(0.5 * (2.0 + 1.0 + 2.0), abs=1e-5)
    assert after < 0.9 * before
