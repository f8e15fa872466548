"""Seconds of the updates of actor and critic on two pipeline stages, fused and not: python benchmarks/fusion.py.

    python benchmarks/fusion.py [--json PATH]

Both are Llamas of 6M parameters. Two ranks of one thread each make updates of 4 micro-batches of 512 tokens: those of
each model alone, and both with fused passes (`training.fuseUpdates`), in turn. The prediction is the mapper's schedule
for the seconds of each model alone. Each rank needs a free core. Seconds are those of the fastest of the rounds, since
other programs make the others slower. Exit code 1 if the fused updates take more than 0.85
of the others, the prediction is off by more than 0.1, or a gradient norm has other bits.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from work import SIZES, make_models

from rlhf_api.spec.job_spec import Optimizer
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.fused_schedule import FusedUpdates, PipelineUpdate
from rlhf_trainer.training import distributed
from rlhf_trainer.training.fused_updates import Updates, run_together
from rlhf_trainer.training.loading import load_language_model, load_scorer
from rlhf_trainer.training.sharding import shard
from rlhf_trainer.training.trainer import Trainer
from rlhf_trainer.workers.base import text_of, whole_texts

WARM_UP, ROUNDS = 2, 12
SHAPE = {**SIZES["0.7M"], "hidden_size": 256, "intermediate_size": 832, "num_hidden_layers": 8}
SHARE, FORESEEN = 0.85, 0.1
STAGES, MICRO_BATCHES, MICRO_TOKENS = 2, 4, 512


def measure(output: Path) -> dict[str, Any]:
    """Seconds of the updates off and on, what was predicted, and whether the gradients are the same."""
    make_models(output, SHAPE)
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    with ProcessPoolExecutor(STAGES, mp_context=get_context("spawn")) as pool:
        seconds, norms = next(iter(pool.map(partial(fused_on_rank, port=port, folder=output), range(STAGES))))
    actor, critic, both = (min(seconds[name]) for name in ("actor", "critic", "both"))
    thirds = [each / (MICRO_BATCHES + STAGES - 1) / 3 for each in (actor, critic)]
    updates = [PipelineUpdate(micro_batches=MICRO_BATCHES, forward=each, backward=2 * each) for each in thirds]
    fused = FusedUpdates(STAGES, updates[0], replace(updates[1], reverses=True))
    pairs = zip(norms["actor"], norms["critic"], strict=True)
    found: dict[str, Any] = {
        "seconds off": actor + critic,
        "seconds on": both,
        "on / off": both / (actor + critic),
        "predicted on / off": fused.schedule.seconds / fused.alone.seconds,
        "same bits": norms["both"] == [each for pair in pairs for each in pair],
    }
    is_foreseen = abs(found["on / off"] - found["predicted on / off"]) <= FORESEEN
    found["ok"] = found["on / off"] <= SHARE and is_foreseen and found["same bits"]
    print(json.dumps(found, indent=2))
    return found


def fused_on_rank(rank: int, port: int, folder: Path) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """(seconds of the updates, their gradient norms) of each model alone, and of both."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(STAGES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.start("CPU", 600)
    layout = ParallelSizes(data=1, pipeline=STAGES)
    kept: dict[str, Any] = {"seed": 0, "trust_remote_code": False, "revision": None}
    load: dict[str, Callable[[], Any]] = {
        "actor": lambda: load_language_model(str(folder / "actor"), **kept),
        "critic": lambda: load_scorer(str(folder / "scorer"), path="", **kept),
    }
    alone = {name: trainer_of(make(), layout) for name, make in load.items()}
    layouts = {"actor": layout, "critic": replace(layout, reverses_stages=True)}
    both = {name: trainer_of(make(), layouts[name]) for name, make in load.items()}
    seconds: dict[str, list[float]] = {"actor": [], "critic": [], "both": []}
    norms: dict[str, list[float]] = {"actor": [], "critic": [], "both": []}
    for _ in range(WARM_UP + ROUNDS):
        for name, chosen in (*((each, {each: alone[each]}) for each in alone), ("both", both)):
            dist.barrier()
            began = time.perf_counter()
            run_together([(one.mesh, an_update(each, one, norms[name])) for each, one in chosen.items()])
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
    return {name: found[WARM_UP:] for name, found in seconds.items()}, norms


def trainer_of(model: Any, layout: ParallelSizes) -> Trainer:
    return Trainer(
        shard(model, layout, compute_dtype=torch.float32, recompute_activations=False),
        token_budget=MICRO_TOKENS,
        optimizer=Optimizer(learning_rate=1e-6),
        total_steps=1,
        max_skipped_updates=0,
        path="models",
        role="model",
        offload="None",
        attention="Auto",
    )


def an_update(name: str, trainer: Trainer, norms: list[float]) -> Updates[None]:
    """One optimizer step on made-up texts."""
    tokens = torch.randint(3, 512, (MICRO_BATCHES * 2, MICRO_TOKENS // 2), generator=torch.Generator().manual_seed(0))
    fields = {"tokens": tokens, "attention_mask": torch.ones(tokens.shape), "response_mask": torch.ones(tokens.shape)}
    texts_of = whole_texts if name == "critic" else lambda micro: [text_of(micro)]

    def loss(output: Any, _: Any) -> torch.Tensor:
        found: torch.Tensor = (output if name == "critic" else output.log_probs).square().mean() / MICRO_BATCHES
        return found

    norm, _ = yield from trainer.updating(fields, texts_of, loss, step=1)
    norms.append(norm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(not found["ok"])


if __name__ == "__main__":
    main()
