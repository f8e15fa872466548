"""Each optimizer step: its learning rate, seen in how far the weights move, by hand; its other settings as torch's."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from rlhf_api.spec.job_spec import Optimizer
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.training.head import Likelihood
from rlhf_trainer.training.loading import load_language_model
from rlhf_trainer.training.optimizer import learning_rate
from rlhf_trainer.training.sharding import shard
from rlhf_trainer.training.trainer import Trainer
from rlhf_trainer.types import Fields
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.reading import all_tokens
from tests.trainer.tiny import save_tiny
from tests.trainer.weights import full_weights

POINTS = "tests.trainer.own_points"
HALF_ROOT = math.sqrt(0.5)
"""cos(pi / 4)"""
SCHEDULES = {
    "constant": (Optimizer(), [1.0, 1.0, 1.0, 1.0]),
    "linear warm-up, then constant": (Optimizer(warmup_steps=4), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    "cosine to a tenth": (
        Optimizer(schedule="Cosine"),
        [0.1 + 0.45 * (1 + HALF_ROOT), 0.1 + 0.45, 0.1 + 0.45 * (1 - HALF_ROOT), 0.1],
    ),
    "linear warm-up, then cosine to a tenth": (
        Optimizer(schedule="Cosine", warmup_steps=2),
        [0.5, 1.0, 0.1 + 0.45 * (1 + HALF_ROOT), 0.1 + 0.45, 0.1 + 0.45 * (1 - HALF_ROOT), 0.1],
    ),
    "linear warm-up, times a function of the user's": (
        Optimizer(schedule=f"{POINTS}:halved", warmup_steps=2),
        [0.5, 1.0, 0.5, 0.5],
    ),
}
"""Settings -> the share of the peak rate at each step of a job that has as many."""
PEAK = 0.01


def largest_moves(folder: str, settings: Optimizer, steps: int) -> list[float]:
    """The largest change of any weight in each step.

    Without moments (both betas 0) AdamW moves each weight by the learning rate, whatever its gradient.
    """
    model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    trainer = Trainer(
        shard(model.requires_grad_(True), compute_dtype=torch.float32, recompute_activations=False),
        token_budget=64,
        optimizer=settings.model_copy(update={"learning_rate": PEAK, "betas": (0.0, 0.0), "epsilon": 1e-30}),
        total_steps=steps,
        max_skipped_updates=0,
        path="models.actor",
        role="actor",
        offload="None",
        attention="Auto",
    )

    def loss(found: Likelihood, _: Fields) -> Tensor:
        return -found.log_probs.mean()

    moves = []
    for step in range(1, steps + 1):
        before = full_weights(trainer.model)
        trainer.update({"tokens": torch.arange(3, 9).reshape(1, 6)}, all_tokens, loss, step=step)
        after = full_weights(trainer.model)
        moves.append(max(float((after[name] - before[name]).abs().max()) for name in before))
    return moves


@pytest.mark.parametrize(("settings", "shares"), SCHEDULES.values(), ids=SCHEDULES)
def test_weights_move_by_the_rate_of_the_step(settings: Optimizer, shares: list[float], tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, seed=1)
    [moves] = run_kept_ranks(1, largest_moves, folder, settings, len(shares))
    assert moves == pytest.approx([PEAK * share for share in shares], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "not_a_number": "returned nan for step 2 of 4, expected a number of at least 0",
        "nothing": r"raised TypeError: nothing\(\) takes 0 positional arguments but 2 were given",
        "missing": "cannot be imported: AttributeError: ",
    }.items(),
)
def test_a_function_that_gives_no_rate_is_one_sentence(name: str, said: str) -> None:
    settings = Optimizer(schedule=f"{POINTS}:{name}")
    with pytest.raises(UserCodeError, match=f"^j: spec.models.actor.optimizer.schedule: {POINTS}:{name} {said}"):
        learning_rate(settings, 2, total_steps=4, path="j: spec.models.actor")


ROWS = torch.arange(3, 15).reshape(2, 6)


def after_two_steps(folder: str, settings: Optimizer) -> dict[str, Tensor]:
    """Of a model in two shards, each of whose ranks learns from a row of its own."""
    model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    trainer = Trainer(
        shard(model.requires_grad_(True), compute_dtype=torch.float32, recompute_activations=False),
        token_budget=64,
        optimizer=settings,
        total_steps=2,
        max_skipped_updates=0,
        path="models.actor",
        role="actor",
        offload="None",
        attention="Auto",
    )

    def loss(found: Likelihood, _: Fields) -> Tensor:
        return -found.log_probs.sum() / 10

    for step in (1, 2):
        trainer.update({"tokens": ROWS[[torch.distributed.get_rank()]]}, all_tokens, loss, step=step)
    return full_weights(trainer.model)


def test_moments_epsilon_and_decay_are_those_of_the_settings(tmp_path: Path) -> None:
    settings = Optimizer(learning_rate=0.1, betas=(0.5, 0.7), epsilon=0.01, weight_decay=0.3, max_grad_norm=0.2)
    folder = save_tiny(tmp_path, seed=1)
    found = run_kept_ranks(2, after_two_steps, folder, settings)[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.5, 0.7), eps=0.01, weight_decay=0.3)
    for _ in range(2):
        plain.zero_grad()
        logits = model(ROWS).logits[:, :-1].flatten(0, 1)
        cross_entropy(logits, ROWS[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        plain.step()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.detach(), rtol=0, atol=1e-6, msg=name)
