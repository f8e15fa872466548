"""One of two ranks, each in a network of its own: rank 0 trains a model, rank 1 generates with it.

python -m tests.trainer.hybrid_engine.slow_link RANK ADDRESS prints one JSON: for all weights and for changes only, the
bytes that this rank's network card sent in each exchange, their seconds, and a digest of the weights that came.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.hybrid_engine.exchange import Exchange
from rlhf_trainer.hybrid_engine.layout import describe
from rlhf_trainer.hybrid_engine.reshard_plan import Parties, plan
from tests.trainer.hybrid_engine.families import config

CARD, PORT = "eth0", "29400"
EXCHANGES, CHANGED = 4, 0.04
"""How many there are, and the share of the elements that change before each but the first."""
ONE = ParallelSizes(data=1)
MODEL = describe(config("qwen2", hidden_size=256, intermediate_size=512, num_hidden_layers=2))


def bytes_sent() -> int:
    """By the network card of this process' network, since it is there."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counts,) = (line.split(":")[1].split() for line in lines if line.strip().startswith(f"{CARD}:"))
    return int(counts[8])


def exchanged(*, sends_changes: bool) -> dict[str, Any]:
    """What each exchange sent and took."""
    rank = dist.get_rank()
    parties = Parties(training=ONE, sources=range(1), generation=ONE, destinations=range(1, 2), nodes=[0, 1])
    own, whole = plan(MODEL, parties, rank), 1 << 20
    exchange = Exchange(
        own, dtype=torch.bfloat16, bucket_bytes=(whole, whole), device=torch.device("cpu"), sends_changes=sends_changes
    )
    torch.manual_seed(1)
    weights = {parameter.name: torch.randn(parameter.shape, dtype=torch.bfloat16) for parameter in MODEL}
    found: dict[str, Any] = {"bytes": [], "seconds": [], "weights": []}
    for _ in range(EXCHANGES):
        dist.barrier()
        before, began = bytes_sent(), time.monotonic()
        came = {name: piece.clone() for name, _, piece in exchange.pieces(weights if rank == 0 else {})}
        exchange.verify({name: bit_sum(piece) for name, piece in came.items()})
        dist.barrier()
        found["bytes"].append(bytes_sent() - before)
        found["seconds"].append(time.monotonic() - began)
        found["weights"].append(digest(came if rank else weights))
        weights = {name: changed(weight) for name, weight in weights.items()}
    return found


def changed(weight: Tensor) -> Tensor:
    """The weight with a share of its elements drawn anew."""
    return torch.where(torch.rand(weight.shape) < CHANGED, torch.randn(weight.shape).to(weight.dtype), weight)


def digest(weights: dict[str, Tensor]) -> str:
    """Of all bits."""
    parts = [weights[name].contiguous().view(torch.uint8).numpy().tobytes() for name in sorted(weights)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ |= {"RANK": sys.argv[1], "WORLD_SIZE": "2", "MASTER_ADDR": sys.argv[2], "MASTER_PORT": PORT}
    os.environ["GLOO_SOCKET_IFNAME"] = CARD
    dist.init_process_group("gloo")
    sys.stdout.write(json.dumps({name: exchanged(sends_changes=name == "Delta") for name in ("Full", "Delta")}))
    dist.destroy_process_group()
