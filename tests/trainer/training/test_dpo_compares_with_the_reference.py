"""DPO with a tiny model: its loss by hand from known log-ratios, and pairs chosen among an actor's responses."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_trainer.protocols import blocks
from rlhf_trainer.telemetry import merge, recorder
from rlhf_trainer.types import Batch, Fields
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.preference import PairChooser, PreferenceActorWorker
from rlhf_trainer.workers.reference import ReferenceWorker
from tests.trainer.jobs import job
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import save_tiny

DATA = {"train": {"uri": "package://rlhf_examples/helpful/train.jsonl"}}
MASK = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
RESPONSE = MASK * torch.tensor([0.0, 1.0, 1.0, 1.0])
SIDES = ("chosen", "rejected")


def pairs() -> dict[str, Tensor]:
    fields = {"valid": torch.ones(2)}
    for place, side in enumerate(SIDES):
        tokens = torch.arange(3, 11).reshape(2, 4) + 20 * place
        fields |= {f"{side}_tokens": tokens, f"{side}_mask": MASK, f"{side}_response_mask": RESPONSE}
    return fields


def dpo(folder: str, shifts: dict[str, float]) -> tuple[dict[str, float], tuple[float, float], tuple[float, float]]:
    """What one update measures, and the accuracy before and after it; reference log-probabilities are shifted."""
    spec = {
        "algorithm": {"name": "DPO", "beta": 0.1},
        "models": {"actor": {"uri": f"file://{folder}", "optimizer": {"learningRate": 1e-2}}},
        "data": DATA,
        "training": {"totalSteps": 1, "batchSize": 2},
    }
    made = job(Path(folder), "job", spec)
    models = made.models()
    actor = PreferenceActorWorker(
        WorkerSetting(job=made, role="actor", model=models["actor"], folder=folder, total_steps=1)
    )
    reference = ReferenceWorker(
        WorkerSetting(job=made, role="reference", model=models["reference"], folder=folder, total_steps=1)
    )
    batch = Batch(step=1, start=0, size=2, fields=pairs())
    batch = batch.with_fields(reference.compute_pair_log_prob(batch))
    batch = batch.with_fields({f"ref_{side}": batch[f"ref_{side}"] - shifts[side] for side in SIDES})
    before = actor.evaluate_pairs(batch)
    recorder.drain()
    actor.update_actor(batch)
    return merge([recorder.drain()]), before, actor.evaluate_pairs(batch)


def test_the_loss_by_hand(tmp_path: Path) -> None:
    """The actor is the reference, so its log-ratios are the shifts: 3 for the chosen, -2 for the rejected responses."""
    folder = save_tiny(tmp_path / "model", seed=3)
    ((record, before, _),) = run_kept_ranks(1, dpo, folder, {"chosen": 3.0, "rejected": -2.0})
    assert record["margin/pairs"] == pytest.approx(0.1 * 5.0, abs=1e-5)
    assert record["loss/dpo"] == pytest.approx(math.log(1 + math.exp(-0.5)), abs=1e-5)
    assert record["accuracy/pairs"] == 1.0
    assert before == (2.0, 2.0)


def test_an_update_makes_the_chosen_likelier_than_the_rejected(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", seed=3)
    ((record, before, after),) = run_kept_ranks(1, dpo, folder, {"chosen": 0.0, "rejected": 0.0})
    assert record["loss/dpo"] == pytest.approx(math.log(2.0), abs=1e-5)
    assert before[0] == 0.0  # a tie is no win
    assert after == (2.0, 2.0)


SCORES = torch.tensor([1.0, 5.0, 3.0, 2.0, 2.0, 2.0, -1.0, 0.0, -2.0, 1.0, 2.0, 3.0])


def choose(folder: str, without: tuple[int, ...] = (), cut_off: tuple[int, ...] = ()) -> Fields:
    """Pairs among three responses to each of four prompts; the fourth is padding. without: rows that have no score."""
    import torch.distributed as dist

    spec = {
        "algorithm": {"name": "OnlineDPO"},
        "models": {role: {"uri": "hf://x"} for role in ("actor", "reward")},
        "data": DATA,
        "rollout": {"samplesPerPrompt": 3},
        "training": {"totalSteps": 1, "promptBatchSize": 4},
    }
    chooser = PairChooser(job(Path(folder), f"job-{dist.get_rank()}", spec))
    tokens = torch.arange(24).reshape(12, 2) + 1
    fields = {
        "tokens": tokens,
        "attention_mask": torch.ones(12, 2),
        "response_mask": torch.tensor([[0.0, 1.0]]).expand(12, 2),
        "finished": torch.tensor([float(row not in cut_off) for row in range(12)]),
        "scores": SCORES,
        "valid": torch.tensor([float(row < 9 and row not in without) for row in range(12)]),
    }
    rows = blocks(12, dist.get_world_size())[dist.get_rank()]
    here = {name: field[rows.start : rows.stop] for name, field in fields.items()}
    return chooser.choose_pairs(Batch(step=1, start=rows.start, size=len(rows), fields=here))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_best_and_the_worst_response_make_a_pair(ranks: int, tmp_path: Path) -> None:
    parts: list[Any] = run_kept_ranks(ranks, choose, str(tmp_path))
    found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    assert found["valid"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0] + [0.0] * 5
    assert found["chosen_tokens"][0].tolist() == [3, 4]  # row 1 has the best score, 5
    assert found["rejected_tokens"][0].tolist() == [1, 2]
    assert found["chosen_tokens"][6].tolist() == [15, 16]  # row 7, score 0
    assert found["rejected_tokens"][6].tolist() == [17, 18]  # row 8, score -2
    assert found["chosen_response_mask"][6].tolist() == [0.0, 1.0]
    assert found["chosen_mask"].sum() == found["rejected_mask"].sum() == 4.0


def test_a_response_without_a_score_is_in_no_pair(tmp_path: Path) -> None:
    """Of the scores 1, 5, 3 the 5 is none; of -1, 0, -2 only one is left."""
    (found,) = run_kept_ranks(1, choose, str(tmp_path), (1, 6, 7))
    assert found["valid"].tolist() == [1.0] + [0.0] * 11
    assert found["chosen_tokens"][0].tolist() == [5, 6]
    assert found["rejected_tokens"][0].tolist() == [1, 2]


def test_an_unfinished_response_is_worse_than_a_finished_one(tmp_path: Path) -> None:
    """Of 1, 5, 3 the 5 was cut off, of 2, 2, 2 the last, and of -1, 0, -2 all."""
    (found,) = run_kept_ranks(1, choose, str(tmp_path), (), (1, 5, 6, 7, 8))
    assert found["valid"].tolist() == [1.0, 0.0, 0.0, 1.0] + [0.0] * 8
    assert found["chosen_tokens"][0].tolist() == [5, 6]
    assert found["rejected_tokens"][0].tolist() == [3, 4]
    assert found["chosen_tokens"][3].tolist() == [7, 8]
    assert found["rejected_tokens"][3].tolist() == [11, 12]
