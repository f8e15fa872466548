"""vLLM leaves a rank its threads, and binds none of them to a core, which another rank might have bound too."""

import os
from pathlib import Path

import torch

from tests.trainer.generation.conftest import RunRanks
from tests.trainer.generation.engines import build, cut, texts
from tests.trainer.generation.models import model_of, prompts, save_config

THREADS = 2


def generate(folder: str) -> tuple[int, set[frozenset[int]]]:
    """Torch's threads after a generation; the sets of cores that this process's threads may run on."""
    torch.set_num_threads(THREADS)
    weights = {name: weight.detach() for name, weight in model_of(folder, 1).named_parameters()}
    engine = build(folder, [[0], [1]])
    holds = engine.held_shards()
    engine.load_weights(cut(weights, holds), holds)
    engine.wake_cache()
    texts(engine, prompts(0), greedy=True)
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    return torch.get_num_threads(), {frozenset(os.sched_getaffinity(task)) for task in tasks}


def test_generating_ranks_keep_threads_and_share_all_cores(tmp_path: Path, vllm_ranks: RunRanks) -> None:
    everywhere = frozenset(os.sched_getaffinity(0))
    assert vllm_ranks(2, generate, save_config(tmp_path, "llama")) == [(THREADS, {everywhere})] * 2
