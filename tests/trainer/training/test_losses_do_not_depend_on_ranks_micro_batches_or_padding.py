"""One update of each trained model: one loss and gradient for 1 and 2 ranks, any micro-batch, any padding.

With epsilon 1 and learning rate 1, AdamW's first step is the gradient itself, nearly: so equal weights mean equal
With epsilon 1 and learning rate 1, the first step of AdamW is the gradient itself, nearly: equal weights mean equal
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_api.names import Role
from rlhf_trainer.protocols import blocks
from rlhf_trainer.telemetry import Report, merge, recorder
from rlhf_trainer.training.sharding import full_weights
from rlhf_trainer.types import Batch
from rlhf_trainer.workers import actor as actor_module
from rlhf_trainer.workers.actor import ActorWorker
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.critic import CriticWorker
from rlhf_trainer.workers.reward import RewardTrainer
from rlhf_trainer.workers.supervised import SupervisedActorWorker
from tests.trainer.jobs import job
from tests.trainer.ranks import run_ranks
from tests.trainer.tiny import save_tiny

ROWS, PROMPT = 8, 4
OPTIMIZER = {"learningRate": 1.0, "epsilon": 1.0}
DATA = {"train": {"uri": "package://rlhf_examples/helpful/train.jsonl"}, "maxPromptTokens": 8, "maxResponseTokens": 32}


def sequences(seed: int, extra: int) -> dict[str, Tensor]:
    """Rows of different lengths, with everything an update may read; `extra` columns of padding that no row needs."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([6, 19, 11, 8, 30, 7, 25, 14])
    width = int(lengths.max())
    positions = torch.arange(width)
    attention = (positions < lengths[:, None]).float()
    response = attention * (positions >= PROMPT)
    noise = {
        name: torch.randn(ROWS, width, generator=generator) * response
        for name in ("old_log_probs", "ref_log_probs", "advantages", "values", "returns")
    }
    fields = {
        "tokens": torch.randint(3, 512, (ROWS, width), generator=generator) * attention.long(),
        "attention_mask": attention,
        "response_mask": response,
        **noise,
    }
    fields["old_log_probs"] = (fields["old_log_probs"] * 0.3 - 6.0) * response
    fields["ref_log_probs"] = (fields["ref_log_probs"] * 0.3 - 6.0) * response
    return {name: pad(field, (0, extra)) for name, field in fields.items()}


def pairs(extra: int) -> dict[str, Tensor]:
    """Pairs of rows; the last one is padding of a short batch."""
    chosen, rejected = sequences(1, extra), sequences(2, extra + 2)
    order = torch.tensor([3, 1, 4, 0, 5, 2, 7, 6])
    return {
        "chosen_tokens": chosen["tokens"],
        "chosen_mask": chosen["attention_mask"],
        "rejected_tokens": rejected["tokens"][order],
        "rejected_mask": rejected["attention_mask"][order],
        "valid": torch.tensor([1.0] * 7 + [0.0]),
    }


class NoGenerator:
    """Stands where vLLM would: these tests do not generate."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass


PPO = {"name": "PPO", "entropyCoefficient": 0.01, "kl": {"applyTo": "Loss", "coefficient": 0.1}}
SPECS: dict[str, dict[str, Any]] = {
    "SFT": {"algorithm": {"name": "SFT"}, "training": {"totalSteps": 4, "batchSize": ROWS}},
    "RewardModel": {"algorithm": {"name": "RewardModel"}, "training": {"totalSteps": 4, "batchSize": ROWS}},
    "PPO": {"algorithm": PPO, "training": {"totalSteps": 4, "promptBatchSize": ROWS, "miniBatchSize": 4}},
}
CASES: dict[str, tuple[str, Role, type, str]] = {
    "SFT": ("SFT", "actor", SupervisedActorWorker, "update_actor"),
    "reward model": ("RewardModel", "reward", RewardTrainer, "update_reward"),
    "PPO actor": ("PPO", "actor", ActorWorker, "update_actor"),
    "PPO critic": ("PPO", "critic", CriticWorker, "update_critic"),
}


def update(case: str, folder: str, budget: int, extra: int, recompute: bool) -> tuple[Report, dict[str, Tensor]]:
    """One update on this rank's rows: what was measured, and the whole weights."""
    import torch.distributed as dist

    algorithm, role, worker_class, method = CASES[case]
    setattr(actor_module, "GenerationEngine", NoGenerator)  # noqa: B010
    uri = f"file://{folder}"
    trained = {"uri": uri, "optimizer": OPTIMIZER, "gradientCheckpointing": recompute}
    models = {"actor": trained, "critic": trained, "reward": {"uri": uri}} if algorithm == "PPO" else {role: trained}
    spec = {**SPECS[algorithm], "models": models, "data": DATA}
    spec["training"] = {**spec["training"], "microBatchTokens": budget}
    made = job(Path(folder), f"job-{dist.get_rank()}", spec)
    arguments: dict[str, Any] = {"max_sequences": 8} if worker_class is ActorWorker else {}
    setting = WorkerSetting(job=made, role=role, model=made.models()[role], folder=folder, total_steps=4)
    worker = worker_class(setting, **arguments)
    fields = pairs(extra) if algorithm == "RewardModel" else sequences(1, extra)
    rows = blocks(ROWS, dist.get_world_size())[dist.get_rank()]
    here = {name: field[rows.start : rows.stop] for name, field in fields.items()}
    recorder.drain()
    getattr(worker, method)(Batch(step=1, start=rows.start, size=len(rows), fields=here))
    return recorder.drain(), {name: weight.clone() for name, weight in full_weights(worker.trainer.model)}


def measured(case: str, folder: str, *, ranks: int, budget: int, extra: int = 0, recompute: bool = False) -> Any:
    results = run_ranks(ranks, update, case, folder, budget, extra, recompute)
    record = merge(report for report, _ in results)
    record.pop("padding/waste")
    return record, results[0][1]


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_the_same_however_it_is_cut(case: str, tmp_path: Path) -> None:
    labels = None if CASES[case][1] == "actor" else 1
    folder = save_tiny(tmp_path / "model", seed=3, labels=labels)
    record, weights = measured(case, folder, ranks=1, budget=100_000)
    variants: dict[str, dict[str, Any]] = {
        "micro-batches of one row": {"ranks": 1, "budget": 1},
        "more padding": {"ranks": 1, "budget": 64, "extra": 9},
        "two ranks": {"ranks": 2, "budget": 100_000},
        "two ranks, small micro-batches, recomputed activations": {"ranks": 2, "budget": 40, "recompute": True},
    }
    for name, variant in variants.items():
        other, moved = measured(case, folder, **variant)
        assert other == pytest.approx(record, rel=1e-5, abs=1e-6), name
        assert moved.keys() == weights.keys()
        for weight in weights:
            torch.testing.assert_close(moved[weight], weights[weight], rtol=0, atol=2e-6, msg=f"{name}: {weight}")


def test_an_update_moves_the_weights(tmp_path: Path) -> None:
    """Else the comparison above would hold for a trainer that does nothing."""
    folder = save_tiny(tmp_path / "model", seed=3)
    _, weights = measured("SFT", folder, ranks=1, budget=100_000)
    from safetensors.torch import load_file

    before = load_file(str(tmp_path / "model" / "model.safetensors"))
    assert all((weights[name] - before[name]).abs().max() > 1e-4 for name in before)
