"""Updates of actor and critic with fused passes on pipeline stages: the same bits as one after the other."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_api.spec.job_spec import Optimizer
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import local_shard
from rlhf_trainer.training.fused_updates import Updates, run_alone, run_together
from rlhf_trainer.training.loading import load_language_model, load_scorer
from rlhf_trainer.training.sharding import shard
from rlhf_trainer.training.trainer import Trainer
from rlhf_trainer.types import Fields
from rlhf_trainer.workers.base import text_of, whole_texts
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import divisible_config, save_tiny

ROWS, TOKENS = 4, 8


def trainer_of(folder: str, layout: ParallelSizes, *, scores: bool) -> Trainer:
    found: dict[str, Any] = {"seed": 0, "trust_remote_code": False, "revision": None}
    model = load_scorer(folder, path="", **found) if scores else load_language_model(folder, **found)
    return Trainer(
        shard(model, layout, compute_dtype=torch.float32, recompute_activations=False),
        token_budget=TOKENS,
        optimizer=Optimizer(learning_rate=0.1, epsilon=1.0),
        total_steps=2,
        max_skipped_updates=0,
        path="models",
        role="critic" if scores else "actor",
        offload="None",
        attention="Auto",
    )


def updates_of(trainer: Trainer, norms: list[float], *, scores: bool) -> Updates[None]:
    """Steps on four micro-batches: two of the critic, then one of both models."""

    def loss(output: Any, micro: Fields) -> Tensor:
        values = output if scores else output.log_probs
        found: Tensor = ((values + 1.0) * micro["response_mask"]).square().sum() / (ROWS * TOKENS)
        recorder.mean(f"loss/{scores}", found.detach(), 1.0)
        return found

    for step in (0, 1) if scores else (1,):
        generator = torch.Generator().manual_seed(10 * step + trainer.mesh.coordinate("data"))
        tokens, mask = torch.randint(3, 500, (ROWS, TOKENS), generator=generator), torch.ones(ROWS, TOKENS)
        fields = {"tokens": tokens, "attention_mask": mask, "response_mask": mask}
        texts_of = whole_texts if scores else lambda micro: [text_of(micro)]
        norm, _ = yield from trainer.updating(fields, texts_of, loss, step=step + 1)
        norms.append(norm)


@contextmanager
def pairs_meet_first() -> Iterator[None]:
    """As with NCCL, the first message of two ranks in a group blocks each of them until the other has called one."""
    met, store = set[tuple[str, int]](), dist.distributed_c10d._get_default_store()

    def after_meeting(transfer: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, tensors: list[Tensor], peer: int, tag: int) -> Any:
            if (pair := (group.group_name, peer)) not in met:
                met.add(pair)
                store.set(f"{pair[0]}: {group.rank()} to {peer}", "here")
                store.wait([f"{pair[0]}: {peer} to {group.rank()}"], timedelta(seconds=60))
            return transfer(group, tensors, peer, tag)

        return call

    with ExitStack() as patches:
        for name in ("send", "recv"):
            way = after_meeting(getattr(dist.ProcessGroup, name))
            patches.enter_context(patch.object(dist.ProcessGroup, name, way))
        yield


Learnt = tuple[list[float], dict[str, tuple[float, float]], list[dict[str, Tensor]]]
"""(gradient norms, means that count on this rank, weights on this rank of each model)."""


def learnt(actor: str, critic: str, layouts: tuple[ParallelSizes, ParallelSizes], fused: bool) -> Learnt:
    trainers = [trainer_of(actor, layouts[0], scores=False), trainer_of(critic, layouts[1], scores=True)]
    norms: tuple[list[float], list[float]] = ([], [])
    updates = [updates_of(trainer, norms[index], scores=index == 1) for index, trainer in enumerate(trainers)]
    recorder.drain()
    if fused:
        with pairs_meet_first():
            run_together([(trainer.mesh, each) for trainer, each in zip(trainers, updates, strict=True)])
    else:
        for trainer, each in zip(trainers, updates, strict=True):
            with recorder.counting(trainer.mesh.is_counted):
                run_alone(each)
    means = {name: mean for name, mean in recorder.drain().means.items() if name.startswith("loss/")}
    weights = [dict(trainer.model.module.named_parameters()) for trainer in trainers]
    held = [{name: local_shard(each).clone() for name, each in of_model.items()} for of_model in weights]
    return [*norms[0], *norms[1]], means, held


@pytest.mark.parametrize(
    "layout",
    [
        ParallelSizes(data=1, pipeline=2),
        pytest.param(ParallelSizes(data=2, pipeline=2), marks=pytest.mark.slow),
        pytest.param(ParallelSizes(data=1, pipeline=4, tensor=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weights_and_gradients_have_the_same_bits(layout: ParallelSizes, tmp_path: Path) -> None:
    folders = [
        save_tiny(tmp_path / name, seed=3, labels=labels, config=divisible_config())
        for name, labels in (("actor", None), ("critic", 1))
    ]
    critics = ParallelSizes(data=layout.data, pipeline=layout.pipeline, tensor=layout.tensor, reverses_stages=True)
    alone = run_kept_ranks(layout.world_size, learnt, *folders, (layout, layout), False)
    fused = run_kept_ranks(layout.world_size, learnt, *folders, (layout, critics), True)
    means = [mean for _, means, _ in fused for mean in means.items()]
    assert sorted(means) == sorted(mean for _, means, _ in alone for mean in means.items())
    for rank, ((norms, _, (actor, critic)), (expected, _, (other, _))) in enumerate(zip(fused, alone, strict=True)):
        *outer, stage = divmod(rank // layout.tensor, layout.pipeline)
        mirrored = (outer[0] * layout.pipeline + layout.pipeline - 1 - stage) * layout.tensor + rank % layout.tensor
        assert norms == expected
        require_equal(actor, other)
        require_equal(critic, alone[mirrored][2][1])


def require_equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
