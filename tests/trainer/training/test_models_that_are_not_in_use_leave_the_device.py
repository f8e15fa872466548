"""Offload on two ranks with the real engine: what is away, what is not, and that no bit differs for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from rlhf_api.spec.job_spec import Offload, Optimizer
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.head import Likelihood
from rlhf_trainer.training.loading import load_language_model, load_tokenizer
from rlhf_trainer.training.offload import bytes_held
from rlhf_trainer.training.saving import save_model
from rlhf_trainer.training.sharding import ShardedModel, shard
from rlhf_trainer.training.trainer import ModelRunner, Trainer
from rlhf_trainer.types import Fields
from tests.each import each_case
from tests.trainer.ranks import run_kept_ranks, run_ranks
from tests.trainer.reading import all_tokens, log_probs
from tests.trainer.tiny import save_tiny
from tests.trainer.weights import full_weights

KINDS: tuple[Offload, ...] = get_args(Offload)


@dataclass
class Seen:
    """What one rank saw."""

    outputs: list[Tensor]
    """Everything computed, in order."""
    weights: dict[str, Tensor]
    restored: dict[str, Tensor]
    """The weights of the checkpoint, after three updates more."""
    held: list[tuple[int, int]]
    """(bytes of the parameters, of the moments) on the device: new, trained, in use without and with moments, after."""
    measured: float


def language_model(folder: str, *, trained: bool = True, steps_in_host: bool = False) -> ShardedModel:
    model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    model.requires_grad_(trained)
    return shard(model, compute_dtype=torch.float32, recompute_activations=False, steps_in_host=steps_in_host)


def life(folder: str, output: str, offload: Offload) -> Seen:
    """Score, train, checkpoint, train on, go back, save."""
    trainer = Trainer(
        language_model(folder, steps_in_host=offload == "OptimizerInHost"),
        token_budget=1024,
        optimizer=Optimizer(learning_rate=1e-2),
        total_steps=10,
        max_skipped_updates=0,
        path="models.actor",
        role="actor",
        offload=offload,
        attention="Auto",
    )
    outputs: list[Tensor] = []

    def held() -> tuple[int, int]:
        return bytes_held(trainer.model.module.parameters()), bytes_held(trainer.offloader._moments())

    def train(steps: range) -> None:
        for step in steps:
            tokens = torch.randint(3, 500, (2, 12), generator=torch.Generator().manual_seed(step))

            def loss(found: Likelihood, _: Fields) -> Tensor:
                share = -found.log_probs.mean() / torch.distributed.get_world_size()
                outputs.append(share.detach())
                return share

            outputs.append(trainer.infer({"tokens": tokens}, all_tokens, log_probs))
            with trainer.offloader.in_use(moments=True):
                trainer.update({"tokens": tokens}, all_tokens, loss, step=step)
                trainer.update({"tokens": tokens}, all_tokens, loss, step=step)

    seen = [held()]
    train(range(1, 4))
    seen.append(held())
    with trainer.offloader.in_use():
        seen.append(held())
        with trainer.offloader.in_use(moments=True):
            seen.append(held())
        weights = full_weights(trainer.model)
    seen.append(held())
    with trainer.offloader.in_use(moments=True):
        trainer.state.begin_save(Path(output) / "checkpoint", then=lambda: None, copies=True)
    train(range(4, 6))
    trainer.state.end_save()
    with trainer.offloader.in_use(moments=True):
        trainer.state.load(f"{output}/checkpoint")
    recorder.drain()
    train(range(4, 7))
    measured = recorder.drain().maxima["idle_bytes/actor"]
    with trainer.offloader.in_use():
        restored = full_weights(trainer.model)
        tokenizer = load_tokenizer(folder, trust_remote_code=False, revision=None)
        save_model(trainer.model, tokenizer, Path(output) / "model")
    return Seen(outputs, weights, restored, seen, measured)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def lives(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[Offload, list[Seen]]:
    """What both ranks saw, by what was offloaded."""
    return {kind: run_kept_ranks(2, life, model, str(tmp_path_factory.mktemp(kind)), kind) for kind in KINDS}


@each_case("kind", [kind for kind in KINDS if kind != "None"])
def test_no_bit_differs(kind: Offload, lives: dict[Offload, list[Seen]]) -> None:
    for seen, plain in zip(lives[kind], lives["None"], strict=True):
        assert len(seen.outputs) == len(plain.outputs) == 24
        assert all(one.equal(other) for one, other in zip(seen.outputs, plain.outputs, strict=True))
        for one, other in ((seen.weights, plain.weights), (seen.restored, plain.restored)):
            assert all(one[name].equal(weight) for name, weight in other.items())
        assert not all(seen.restored[name].equal(weight) for name, weight in seen.weights.items()), "it went on"


@each_case("kind", KINDS)
def test_what_is_not_in_use_is_where_the_manifest_says(kind: Offload, lives: dict[Offload, list[Seen]]) -> None:
    for seen, plain in zip(lives[kind], lives["None"], strict=True):
        parameters, moments = plain.held[1]
        assert moments == 2 * parameters > 0
        at_home = ("None", "OptimizerInHost")  # it is never moved, for its home is host memory
        rest = (parameters * (kind in (*at_home, "Optimizer")), moments * (kind in (*at_home, "Parameters")))
        assert seen.held == [(rest[0], 0), rest, (parameters, rest[1]), (parameters, moments), rest]
        assert seen.measured == sum(rest) * (kind != "OptimizerInHost")


def frozen(folder: str) -> tuple[Tensor, Tensor, int, bool]:
    """(scores, those of the same model offloaded, bytes it holds at rest, whether its weights can be read there)."""
    tokens = torch.randint(3, 500, (2, 12), generator=torch.Generator().manual_seed(1))
    engines = [
        ModelRunner(
            language_model(folder, trained=False), token_budget=1024, role="reference", offload=kind, attention="Auto"
        )
        for kind in ("None", "Parameters")
    ]
    here, away = (engine.infer({"tokens": tokens}, all_tokens, log_probs) for engine in engines)
    try:
        full_weights(engines[1].model)
        readable = True
    except AssertionError:
        readable = False
    return here, away, bytes_held(engines[1].model.module.parameters()), readable


def test_a_frozen_model_leaves_too_and_cannot_be_read_by_mistake(model: str) -> None:
    for here, away, held, readable in run_ranks(2, frozen, model):
        assert here.equal(away)
        assert held == 0
        assert not readable
