"""Two and more GPUs: however a model is cut over them, its gradient's norm is one rank's, its generator agrees."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from rlhf_trainer.protocols import blocks
from rlhf_trainer.telemetry import merge, recorder
from rlhf_trainer.training import distributed
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.actor import ActorWorker
from rlhf_trainer.workers.generating_actor import ROLLOUT_KL_LIMIT
from tests.gpu.actors import actor_of, random_model
from tests.gpu.rung import COLLECTIVE_SECONDS, Rung, contract_of, free_port, main
from tests.real_size.step import Case, batch_of

ROWS = 16
NORM_ROUNDING = {"FP32": 1e-4, "BF16": 0.03}
"""How far gradient norms may differ between layouts, as a share."""


def measure(rung: Rung) -> None:
    """One rank, then the ranks of all GPUs in each layout."""
    if not rung.can_generate():
        return
    ranks = 2 if rung.rehearse else torch.cuda.device_count() // 2 * 2
    if not ranks:
        rung.skipped["layouts"] = "there is one GPU"
        return
    layouts: dict[str, tuple[int, dict[str, int]]] = {
        "one rank": (1, {}),
        "data": (ranks, {}),
        "tensor": (ranks, {"tensor": 2}),
        "pipeline": (ranks, {"pipeline": 2}),
    }
    for name, (world, layout) in layouts.items():
        with rung.part(name) as found:
            case = Case(
                shape="Llama-1M",
                ranks=world,
                algorithm="GRPO",
                layout=layout,
                tensor_generation=layout.get("tensor", 1),
                rows=ROWS // (world // max([1, *layout.values()])),
                prompt=16,
                response=16,
                training={"precision": rung.precision},
            )
            folders = random_model(case, rung.folder / "model")
            answer = rung.folder / f"{name}.json"
            spawn(_rank, (case, folders, rung.rehearse, rung.rollout, free_port(), str(answer)), nprocs=world)  # type: ignore[no-untyped-call]
            found.update(json.loads(answer.read_text()))
            _require_alike(found, rung.figures["one rank"], rung.precision)


def _require_alike(found: Mapping[str, Any], alone: Mapping[str, Any], precision: str) -> None:
    off = abs(found["grad_norm"] / alone["grad_norm"] - 1)
    assert off < NORM_ROUNDING[precision], f"the gradient norm differs from one rank's by {off:.2g}"
    limit = ROLLOUT_KL_LIMIT[torch.float32 if precision == "FP32" else torch.bfloat16]
    assert found["kl"] < limit, f"trainer and generator disagree by more than {limit} a token"


def _rank(
    rank: int,
    case: Case,
    folders: dict[str, str],
    rehearse: bool,
    rollout: Mapping[str, Any],
    port: int,
    answer: str,
) -> None:
    """A rank, which sees one GPU, as under Ray."""
    os.environ.update(contract_of(rank, case.ranks, port))
    if not rehearse:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(
            ","
        )
        os.environ.update(CUDA_VISIBLE_DEVICES=visible[rank], LOCAL_RANK="0")
    distributed.start("CPU" if rehearse else "GPU", COLLECTIVE_SECONDS)
    share = {} if rehearse else {"gpuMemoryUtilization": 0.2, **rollout}
    actor = actor_of(case, folders, learning_rate=1e-3, rollout=share)
    recorder.drain()
    rows = blocks(ROWS, actor.trainer.mesh.layout.data)[actor.trainer.mesh.coordinate("data")]
    kl = [_generated(actor, rows)]
    recorder.drain()
    actor.update_actor(_fixed(actor, case, rows))
    norm = merge([recorder.drain()])["grad_norm/policy"]
    kl.append(_generated(actor, rows))  # by the new weights
    every: list[float] = [0.0] * case.ranks
    dist.all_gather_object(every, max(kl))
    if rank == 0:
        Path(answer).write_text(json.dumps({"grad_norm": norm, "kl": max(every)}))
    dist.barrier()
    os._exit(0)  # vLLM's threads may abort a process that ends otherwise


def _fixed(actor: ActorWorker, case: Case, rows: range) -> Batch:
    """This rank's rows of a batch that is the same in every layout."""
    every = batch_of(replace(case, rows=ROWS))
    fields = {name: field[rows.start : rows.stop] for name, field in every.fields.items()}
    batch = Batch(step=1, start=rows.start, size=len(rows), fields=fields)
    return batch.with_fields(actor.compute_log_prob(batch))


def _generated(actor: ActorWorker, rows: range) -> float:
    """The KL per token between generator and trainer on sampled responses."""
    size, width = len(rows), 8
    ids = (torch.arange(rows.start * width, rows.stop * width) % 400 + 3).view(size, width)
    fields = {"prompt_ids": ids, "prompt_mask": torch.ones(size, width), "valid": torch.ones(size)}
    batch = Batch(step=1, start=rows.start, size=size, fields=fields)
    batch = batch.with_fields(actor.generate_sequences(batch))
    actor.compute_log_prob(batch)
    return merge([recorder.drain()])["kl/rollout"]


if __name__ == "__main__":
    main(measure, one_rank=False)
