"""`training.compile`: compiled layers give the numbers of others, and are refused where they cannot be compiled."""

from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from rlhf_api.spec.job_spec import Optimizer
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import ConfigError, EnvironmentProblem
from rlhf_trainer.training.head import Likelihood
from rlhf_trainer.training.loading import load_language_model
from rlhf_trainer.training.model_input import TokenBatch
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.sharding import ShardedModel, shard
from rlhf_trainer.training.trainer import Trainer
from rlhf_trainer.types import Fields
from rlhf_trainer.workers import rollout
from rlhf_trainer.workers.actor import ActorWorker
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.supervised import SupervisedActorWorker
from tests.trainer.jobs import job
from tests.trainer.ranks import run_ranks
from tests.trainer.stand_in import GeneratorStandIn
from tests.trainer.tiny import divisible_config, save_tiny

UPDATES, WIDTH, ROWS = 3, 12, 4
Learnt = tuple[list[float], int]
"""(loss and gradient norm of each update, graphs that were compiled)."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = divisible_config()
    config.num_hidden_layers = 2
    return save_tiny(tmp_path_factory.mktemp("model"), seed=3, config=config)


def sharded(folder: str, layout: ParallelSizes, *, recompute: bool, compiled: bool) -> ShardedModel:
    model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    model.requires_grad_(True)
    return shard(model, layout, compute_dtype=torch.float32, recompute_activations=recompute, compile_layers=compiled)


def texts_of(micro: Fields) -> list[TokenBatch]:
    return [TokenBatch(tokens=micro["tokens"], lengths=micro["lengths"], read=torch.ones(micro["tokens"].shape))]


def learnt(folder: str, layout: ParallelSizes, recompute: bool, backend: str) -> Learnt:
    """From updates of texts of ever other lengths; a backend compiles the layers if it is named."""
    with patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend)):
        model = sharded(folder, layout, recompute=recompute, compiled=bool(backend))
    trainer = Trainer(
        model,
        token_budget=20,
        optimizer=Optimizer(learning_rate=1e-2),
        total_steps=10,
        max_skipped_updates=0,
        path="models.actor",
        role="actor",
        offload="None",
        attention="Auto",
    )
    seen: list[float] = []
    for step in range(1, UPDATES + 1):
        generator = torch.Generator().manual_seed(10 * step + trainer.mesh.coordinate("data"))
        tokens = torch.randint(3, 500, (ROWS, WIDTH), generator=generator)
        lengths = torch.randint(2, WIDTH, (ROWS,), generator=generator)
        shares: list[Tensor] = []

        def loss(found: Likelihood, _: Fields, shares: list[Tensor] = shares) -> Tensor:
            share = -found.log_probs.sum() / 50
            shares.append(share.detach())
            return share

        norm = trainer.update({"tokens": tokens, "lengths": lengths}, texts_of, loss, step=step)
        seen += [float(torch.stack(shares).sum()), norm]
    from torch._dynamo.utils import counters

    return seen, counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "ranks", "recompute"),
    [("aot_eager", 1, False), ("inductor", 2, True)],
)
def test_updates_are_the_same(backend: str, ranks: int, recompute: bool, model: str) -> None:
    layout = ParallelSizes(data=ranks)
    for (seen, graphs), (expected, none) in zip(
        run_ranks(ranks, learnt, model, layout, recompute, backend),
        run_ranks(ranks, learnt, model, layout, recompute, ""),
        strict=True,
    ):
        assert seen == pytest.approx(expected, rel=1e-5)
        assert expected[0] > expected[-2], "the losses differ from update to update"
        assert graphs > 0 == none


def refusals(folder: str) -> list[str]:
    from torch._inductor import config

    with patch.object(config.cpp, "cxx", (None, "no-such-compiler")), pytest.raises(EnvironmentProblem) as missing:
        sharded(folder, ParallelSizes(data=2), recompute=False, compiled=True)
    with pytest.raises(ConfigError) as cut:
        sharded(folder, ParallelSizes(data=1, tensor=2), recompute=False, compiled=True)
    return [str(missing.value), str(cut.value)]


def test_layers_that_cannot_be_compiled_are_refused(model: str) -> None:
    assert run_ranks(2, refusals, model)[0] == [
        "spec.training.compile needs a C++ compiler: install g++ or name one in CXX",
        "spec.training.compile: layers cannot be compiled with tensor 2, only 1",
    ]


def workers(folder: str) -> str:
    """Makes a trained and a frozen model, whose layers are all compiled; returns why a generating actor is refused."""
    setattr(rollout, "GenerationEngine", GeneratorStandIn)  # noqa: B010
    uri = f"file://{folder}"
    specs: list[dict[str, Any]] = [
        {"algorithm": {"name": "SFT"}, "training": {"batchSize": 4}},
        {
            "algorithm": {"name": "GRPO"},
            "training": {"promptBatchSize": 4},
            "models": {"reward": {"uri": uri}},
            "rollout": {"samplesPerPrompt": 2},
        },
    ]
    made = []
    for spec in specs:
        rows = {"uri": "package://rlhf_examples/helpful/train.jsonl"}
        spec["data"] = {"train": rows, "maxPromptTokens": 8, "maxResponseTokens": 8}
        spec["models"] = {"actor": {"uri": uri, "optimizer": {}}, **spec.get("models", {})}
        spec["training"] |= {"totalSteps": 4, "compile": True}
        each = job(Path(folder), "compiled", spec)
        made.append(WorkerSetting(job=each, role="actor", model=each.models()["actor"], folder=folder, total_steps=4))
    trained = SupervisedActorWorker(made[0]).trainer.model
    frozen = made[0].frozen(made[0].language_model()).model
    for model in (trained, frozen):
        for layer in inner(model.module).base_model.layers:
            assert layer._compiled_call_impl is not None
    with pytest.raises(ConfigError) as refused:
        ActorWorker(made[1], max_sequences=4)
    return str(refused.value)


def test_the_manifest_says_so(model: str) -> None:
    expected = "spec.training.compile: layers cannot be compiled where responses are generated on CPU"
    assert run_ranks(1, workers, model) == [expected]
