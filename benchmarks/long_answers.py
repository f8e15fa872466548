"""Answers of very different lengths, and a real vocabulary: python benchmarks/long_answers.py [--json PATH].

A manifest cannot force the length of each response, so nothing is generated: two ranks of one thread each train on
made-up texts by the worker of SFT, whose micro-batches, packing, dealing of rows and head are those of every algorithm.
64 responses to prompts of 32 tokens have the lengths of a log-normal distribution with a median of 32 tokens, of which
a tenth is cut at 8 times that. Each part is taken back in turn: rows are padded to the longest, ranks keep the rows
that they are given, or all logits are there at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import NormalDist, median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from work import PROMPT_TOKENS, RESPONSES, SIZES, host, make_models, ratio, spread

from rlhf_api.job import Job
from rlhf_trainer.training import batching, distributed, head
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.supervised import SupervisedActorWorker

RANKS, MEDIAN, LONGEST = 2, 32, 256
BODIES = {"27M, 512 tokens": SIZES["27M"], "0.7M, 151,936 tokens": SIZES["0.7M"] | {"vocab_size": 151_936}}
"""Qwen2.5's vocabulary on the smaller body."""
DEFAULT = "as it is"
WITHOUT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    DEFAULT: nullcontext,
    "padded": nullcontext,
    "not dealt": lambda: patch.object(
        batching, "assign_bundles", lambda costs: [[at] * len(own) for at, own in enumerate(costs)]
    ),
    "logits at once": lambda: patch.object(head, "MAX_CHUNK_LOGITS", 2**60),
}


def lengths() -> list[int]:
    """Tokens of each response, in the order of chance."""
    sigma = math.log(LONGEST / MEDIAN) / NormalDist().inv_cdf(0.9)
    levels = [NormalDist().inv_cdf((place + 0.5) / RESPONSES) for place in range(RESPONSES)]
    found = [min(LONGEST, round(MEDIAN * math.exp(sigma * level))) for level in levels]
    random.Random(0).shuffle(found)
    return [max(1, length) for length in found]


def batch_of(rank: int, vocabulary: int, *, padded: bool) -> Batch:
    """The rows of a rank; padded: what pads a row to the longest is computed like text, and not read."""
    own = torch.tensor(lengths()).view(RANKS, -1)[rank]
    places = torch.arange(PROMPT_TOKENS + LONGEST)
    inside = places < (PROMPT_TOKENS + own)[:, None]
    tokens = torch.randint(3, vocabulary, inside.shape, generator=torch.Generator().manual_seed(rank)) * inside
    fields = {
        "tokens": tokens,
        "attention_mask": torch.ones_like(tokens) if padded else inside.long(),
        "response_mask": (inside & (places >= PROMPT_TOKENS)).float(),
    }
    return Batch(step=1, start=rank * len(own), size=len(own), fields=fields)


def on_rank(rank: int, port: int, folder: str, vocabulary: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of an update in each round, by what is taken back."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.start("CPU", 600)
    spec = {
        "algorithm": {"name": "SFT"},
        "models": {"actor": {"uri": f"file://{folder}"}},
        "data": {"train": {"uri": "file:///none"}},
        "training": {"totalSteps": 1, "batchSize": RESPONSES},
    }
    kind = {"apiVersion": "rlhf.hybridflow.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "long"}}
    job = Job.parse({**kind, "spec": spec})
    setting = WorkerSetting(job=job, role="actor", model=job.models()["actor"], folder=folder, total_steps=1)
    worker = SupervisedActorWorker(setting)
    found: dict[str, list[float]] = {name: [] for name in WITHOUT}
    for _ in range(1 + rounds):
        for name, without in WITHOUT.items():
            batch = batch_of(rank, vocabulary, padded=name == "padded")
            with without():
                dist.barrier()
                began = time.perf_counter()
                worker.update_actor(batch)
                dist.barrier()
                found[name].append(time.perf_counter() - began)
    return {name: seconds[1:] for name, seconds in found.items()}


def measure(shape: dict[str, int], rounds: int) -> dict[str, Any]:
    """Median seconds of an update, and ratios to it of what is taken back."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as door:
        make_models(Path(folder), shape)
        vocabulary = json.loads((Path(folder) / "actor" / "config.json").read_text())["vocab_size"]
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
        door.close()
        work = partial(on_rank, port=port, folder=f"{folder}/actor", vocabulary=vocabulary, rounds=rounds)
        with ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as pool:
            found, *_ = pool.map(work, range(RANKS))
    ratios = {
        name: spread([each / own for each, own in zip(seconds, found[DEFAULT], strict=True)])
        for name, seconds in found.items()
        if name != DEFAULT
    }
    return {"seconds": median(found[DEFAULT]), "ratios": ratios}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    results = {name: measure(shape, options.rounds) for name, shape in BODIES.items()}
    table = Table("", *results, title=f"an update on answers of 1 to {LONGEST} tokens; {RANKS} ranks, {host()}")
    table.add_row(f"{DEFAULT}, seconds", *(f"{result['seconds']:.2f}" for result in results.values()))
    for name in next(iter(results.values()))["ratios"]:
        table.add_row(f"{name} / {DEFAULT}", *(ratio(result["ratios"][name]) for result in results.values()))
    Console(width=100).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
