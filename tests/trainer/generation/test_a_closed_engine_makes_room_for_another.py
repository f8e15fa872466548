"""An engine is closed, and another on other ranks is built in the same processes, whose own groups go on working."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.trainer.generation.conftest import RunRanks
from tests.trainer.generation.engines import KEPT, build, cut, texts
from tests.trainer.generation.models import model_of, prompts, save_config

pytestmark = pytest.mark.slow


def one_engine_after_another(folder: str) -> list[list[list[int]]]:
    """What engines write: one of two shards, one of two stages, one on each rank, and one of two shards again."""
    weights = {name: weight.detach() for name, weight in model_of(folder, 1).named_parameters()}
    written = []
    alone = [[0], [1]]
    for groups, layers in (([[0, 1]], ()), (alone, (1, 2)), (alone, ()), ([[0, 1]], ())):
        engine = build(folder, groups, layers)
        holds = engine.held_shards()
        engine.load_weights(cut(weights, holds), holds)
        engine.wake_cache()
        written.append(texts(engine, prompts(0), greedy=True))
        engine.close()
        KEPT.remove(engine)
        del engine
        gc.collect()
        dist.all_reduce(torch.ones(1))
    return written


def test_the_next_engine_writes_the_same_groups_stay(tmp_path: Path, vllm_ranks: RunRanks) -> None:
    folder = save_config(tmp_path, "llama")
    for written in vllm_ranks(2, one_engine_after_another, folder):
        assert all(texts == written[0] for texts in written)
