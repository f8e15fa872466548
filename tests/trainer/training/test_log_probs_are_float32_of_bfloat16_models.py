"""Where a model computes in bfloat16, what is summed over the vocabulary stays float32, and the backward pass runs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_api.spec.job_spec import Optimizer
from rlhf_trainer.training.head import Likelihood
from rlhf_trainer.training.loading import load_language_model
from rlhf_trainer.training.model_input import ModelInput, TokenBatch
from rlhf_trainer.training.sharding import shard
from rlhf_trainer.training.trainer import Trainer
from rlhf_trainer.types import Fields
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import save_tiny
from tests.trainer.weights import full_weights

TEMPERATURE = 0.7
"""No number of bfloat16."""
TOKENS = torch.arange(3, 27).reshape(2, 12)


def texts_of(micro: Fields) -> list[TokenBatch]:
    rows, width = micro["tokens"].shape
    lengths, read = torch.full((rows,), width), torch.ones(rows, width)
    return [TokenBatch(tokens=micro["tokens"], lengths=lengths, read=read, temperature=TEMPERATURE, entropy=True)]


def read_and_updated(folder: str) -> tuple[Likelihood, float, float]:
    """(what is computed of TOKENS, the gradient norm of an update, the farthest move of a weight)."""
    model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    trainer = Trainer(
        shard(model.requires_grad_(True), compute_dtype=torch.bfloat16, recompute_activations=False),
        token_budget=64,
        optimizer=Optimizer(learning_rate=0.01),
        total_steps=1,
        max_skipped_updates=0,
        path="models.actor",
        role="actor",
        offload="None",
        attention="Auto",
    )
    given = ModelInput.of(texts_of({"tokens": TOKENS}))
    with torch.no_grad():
        found = trainer.model.module(given.tokens, given)

    def loss(found: Likelihood, _: Fields) -> Tensor:
        return -found.log_probs.mean() - 0.1 * found.entropy.mean()

    before = full_weights(trainer.model)
    norm = trainer.update({"tokens": TOKENS}, texts_of, loss, step=1)
    after = full_weights(trainer.model)
    return found, norm, max(float((after[name] - before[name]).abs().max()) for name in before)


def test_sums_are_float32_and_an_update_runs(tmp_path: Path) -> None:
    [(found, norm, moved)] = run_kept_ranks(1, read_and_updated, save_tiny(tmp_path, seed=1))
    for values in (found.log_probs, found.entropy):
        assert values.dtype == torch.float32
        assert not torch.equal(values, values.bfloat16().float())  # no sum was rounded on its way
    assert norm > 0
    assert moved == pytest.approx(0.01, rel=0.1)
