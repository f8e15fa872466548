"""Time and bytes of a transition from training to generation: python benchmarks/reshard.py [--plan] [--json PATH].

The three modes side by side on 8 ranks (1-4-2 to 1-2-2-2), growth over the data-parallel replicas (1-2-d to 1-1), and
the copy limit of one rank. Ranks are processes of this machine, joined by gloo; weights are float32 in training and
bfloat16 on the wire. Bytes are counted where the collectives are called; each time is the median of a few transitions,
from a barrier to the last rank. With --device cuda only the one rank is measured, on the GPU. Needs torch, transformers
and pydantic. With --plan nothing is moved: what one rank plans in pools of 8 to 1,024 ranks. The projection to Fig. 14
of the paper is a model of bytes over links, not a measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.hybrid_engine.buckets import loads, steps
from rlhf_trainer.hybrid_engine.exchange import Exchange
from rlhf_trainer.hybrid_engine.hybrid_engine import BUCKET_BYTES
from rlhf_trainer.hybrid_engine.layout import Parameter, Shards, describe
from rlhf_trainer.hybrid_engine.reshard_plan import Parties, plan
from rlhf_trainer.tensor_slice import WeightSlice
from tests.trainer.hybrid_engine.baselines import MODES, Mode, Transition, entering, received, transition

SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)
SIZES: dict[str, dict[str, Any]] = {
    "27 M": dict(zip(SHAPE, (1024, 512, 1536, 8, 8, 8, True), strict=True)),
    "0.5 B": dict(zip(SHAPE, (32000, 1024, 4864, 24, 16, 8, False), strict=True)),
    "7 B": dict(zip(SHAPE, (32000, 4096, 11008, 32, 32, 32, False), strict=True)),
    "70 B": dict(zip(SHAPE, (128256, 8192, 28672, 80, 64, 8, False), strict=True)),
}
WIRE = torch.bfloat16
SIDE_BY_SIDE = ParallelSizes(data=2, tensor=4, generation_tensor=2)
GROWTH = tuple(ParallelSizes(data=data, tensor=2, generation_tensor=1) for data in (1, 2, 3, 4))
REPEATS = 5
NVLINK, NETWORK, PER_MACHINE = 300e9, 25e9, 8
"""The paper's testbed: bytes a second into a GPU from its machine, into a machine from the others; GPUs a machine."""
GPUS = 128
FIG_14: dict[str, tuple[float, int, int, int, tuple[float, float, float]]] = {
    "7B": (14e9, 8, 1, 2, (3.8, 4.7, 5.0)),
    "13B": (26e9, 8, 1, 4, (3.2, 10.0, 11.9)),
    "34B": (68e9, 8, 4, 8, (4.7, 19.8, 19.1)),
    "70B": (140e9, 8, 8, 8, (9.8, 33.3, 33.3)),
}
"""model -> (bytes, t, p, t_g, seconds of each mode on 128 GPUs as read off the figure); p_g is 1."""
PLANNED: dict[str, tuple[ParallelSizes, ...]] = {
    "7 B": (
        ParallelSizes(data=2, tensor=4, generation_tensor=2, replicas=2),
        ParallelSizes(data=8),
        ParallelSizes(data=2, pipeline=4, generation_pipeline=1),
        ParallelSizes(data=32),
        ParallelSizes(data=256),
        ParallelSizes(data=256, replicas=32),
        ParallelSizes(data=1024),
    ),
    "70 B": (
        ParallelSizes(data=4, tensor=8, generation_tensor=4),
        ParallelSizes(data=4, pipeline=2, tensor=8, generation_pipeline=1, generation_tensor=4, replicas=4),
        ParallelSizes(data=8, tensor=8, generation_tensor=4),
        ParallelSizes(data=32, tensor=8, generation_tensor=4),
        ParallelSizes(data=8, pipeline=4, tensor=8, generation_pipeline=1, generation_tensor=8),
        ParallelSizes(data=128, tensor=8, generation_tensor=4),
        ParallelSizes(data=16, pipeline=8, tensor=8, generation_pipeline=1, generation_tensor=4),
    ),
}
"""Layouts that are planned, nothing moved; weights are sharded over d but for `replicas`."""
Figures = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """A transition to be measured."""

    mode: Mode
    layout: ParallelSizes
    shards: int
    keeps: bool
    """Whether what arrives is kept; else it is copied into one buffer, as where vLLM packs a layer at a time."""


def bytes_of(slices: Shards, dtype: torch.dtype) -> int:
    return sum(part.numel for part in slices.values()) * dtype.itemsize


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Median seconds of an action, from all ranks' start to the end of the last; the first time does not count."""
    seconds = []
    for _ in range(1 + REPEATS):
        synchronise(device)
        start = time.perf_counter()
        action()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def synchronise(device: torch.device) -> None:
    """Wait for the device and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def keep(pieces: Iterable[WeightSlice], whole: dict[str, Tensor], slices: Shards) -> None:
    """Put the pieces where they belong in buffers that are there already."""
    for name, part, piece in pieces:
        whole[name][part.within(slices[name])] = piece


def drop(pieces: Iterable[WeightSlice], scratch: Tensor) -> None:
    """Copy each piece to the same place."""
    for _, part, piece in pieces:
        scratch[: part.numel].view(part.shape).copy_(piece)


def consumer(trial: Trial, way: Transition, rank: int, device: torch.device) -> Callable[[Iterable[WeightSlice]], None]:
    """Copy the pieces as the generator does; its memory is allocated before the measurement."""
    slices = way.plans[rank].wanted
    if not trial.keeps:
        scratch = torch.ones(max(part.numel for part in slices.values()), dtype=WIRE, device=device)
        return lambda pieces: drop(pieces, scratch)
    held = {name: torch.ones(part.shape, dtype=WIRE, device=device) for name, part in slices.items()}

    def keeping(pieces: Iterable[WeightSlice]) -> None:
        keep(pieces, held, slices)
        if trial.mode != "HybridFlow":  # the whole model came; the shard is cut out of it
            for name, part in way.kept[rank].items():
                held[name][part.within(slices[name])].clone()

    return keeping


def measure(trial: Trial, model: Sequence[Parameter], device: torch.device) -> Figures:
    """The figures of this rank."""
    rank = dist.get_rank()
    way = transition(trial.mode, model, trial.layout, shards=trial.shards)
    made = way.plans[rank]
    weights = {name: torch.ones(part.shape, device=device) for name, part in made.held.items()}
    exchange = Exchange(made, dtype=WIRE, bucket_bytes=BUCKET_BYTES, device=device)
    take = consumer(trial, way, rank, device)
    seconds = timed(lambda: take(exchange.pieces(weights)), device)
    traffic, own = exchange.stats, bytes_of(made.held, torch.float32)
    assert traffic.received == received(made) * WIRE.itemsize
    figures: Figures = {
        "received": traffic.received,
        "sent": traffic.sent,
        "collectives": traffic.collectives,
        "seconds": seconds,
        "buffers": traffic.buffers,
        "training_shard": own,
        "generation": bytes_of(made.wanted, WIRE),
    }
    if trial.layout.world_size == 1:
        source, target = (torch.ones(figures["generation"] // WIRE.itemsize, dtype=WIRE, device=device) for _ in "ab")
        figures["copy_seconds"] = timed(lambda: target.copy_(source), device)
    return {**figures, "peak": own + figures["generation"] + figures["buffers"]}


def on_rank(rank: int, world: int, store: str, trials: Sequence[Trial], size: str, device: str, results: Any) -> None:
    """One process: all trials, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model = describe(LlamaConfig(**SIZES[size]))
    figures = []
    for trial in trials:
        figures.append(measure(trial, model, torch.device(device)))
        gc.collect()
    results.put((rank, figures))
    dist.barrier()
    dist.destroy_process_group()


def figures_of(trials: Sequence[Trial], size: str, device: str) -> list[list[Figures]]:
    """[trial][rank] of trials on the same number of ranks."""
    world = trials[0].layout.world_size
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, f"{folder}/store", trials, size, device, results)
        processes = [context.Process(target=on_rank, args=(rank, *arguments)) for rank in range(world)]
        for process in processes:
            process.start()
        by_rank = dict(results.get(timeout=1800) for _ in processes)
        for process in processes:
            process.join()
    return [[by_rank[rank][index] for rank in range(world)] for index in range(len(trials))]


def summary(ranks: Sequence[Figures]) -> Figures:
    """The largest of each figure over the ranks, and the bytes that all of them receive."""
    return {
        **{name: max(rank[name] for rank in ranks) for name in ranks[0]},
        "total": sum(r["received"] for r in ranks),
    }


def side_by_side(size: str) -> dict[str, Figures]:
    """The modes; HybridFlow also with weights that FSDP shards, as DS-Chat's always are."""
    data = SIDE_BY_SIDE.data
    trials: dict[str, Trial] = {mode: Trial(mode, SIDE_BY_SIDE, 1, keeps=True) for mode in MODES}
    everything = {**trials, "HybridFlow, FSDP": Trial("HybridFlow", SIDE_BY_SIDE, data, keeps=True)}
    found = figures_of(list(everything.values()), size, "cpu")
    return {name: summary(ranks) for name, ranks in zip(everything, found, strict=True)}


def growth(size: str) -> dict[str, Figures]:
    """HybridFlow on more and more replicas; seconds per byte are those of the bytes of the whole machine."""
    found = {}
    for layout in GROWTH:
        figures = summary(figures_of([Trial("HybridFlow", layout, 1, keeps=False)], size, "cpu")[0])
        found[f"d = {layout.data}"] = {**figures, "nanoseconds_per_byte": figures["seconds"] / figures["total"] * 1e9}
    return found


def one_rank(size: str, device: str) -> Figures:
    """A rank that has all it needs: cast and copy, against a copy between two buffers of the same device."""
    ((figures,),) = figures_of([Trial("HybridFlow", ParallelSizes(data=1), 1, keeps=True)], size, device)
    seconds = {"GBps": figures["seconds"], "copy_GBps": figures["copy_seconds"]}
    return {**figures, **{name: figures["generation"] / value / 1e9 for name, value in seconds.items()}}


def planned(model: Sequence[Parameter], sizes: ParallelSizes) -> Figures:
    """Plan for one rank, the last of the first replica; return the plan's seconds and the bytes that enter its node."""
    nodes = [rank // PER_MACHINE for rank in range(sizes.world_size)]
    size = sizes.shards * sizes.pipeline * sizes.tensor
    parties = Parties.replica(sizes, nodes, size - 1)
    node = [plan(model, parties, rank) for rank in parties.sources if nodes[rank] == nodes[size - 1]]
    ends = node + [plan(model, parties, rank) for rank in parties.sources if nodes[rank] == 0]
    of_all = torch.stack([loads(made) for made in ends])  # the first and the last stage send most
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        own = plan(model, Parties.replica(sizes, nodes, size - 1), size - 1)
        found = steps(own, of_all, (BUCKET_BYTES[0] // WIRE.itemsize, BUCKET_BYTES[1] // WIRE.itemsize))
        seconds.append(time.perf_counter() - start)
    entered, bound = entering(node)
    buffers = (3 if any(of_all[..., 0].flatten()) else 2) * max(step.numel for step in found)
    return {
        "seconds": median(seconds),
        "parts": sum(len(step.sends) + len(step.receives) for step in found),
        "collectives": sum(step.is_exchanged for step in found) + 2,
        "buffers": buffers * WIRE.itemsize,
        "received": received(own) * WIRE.itemsize,
        "enters_node": entered * WIRE.itemsize,
        "bound_of_node": bound * WIRE.itemsize,
    }


def plans(name: str) -> dict[str, Figures]:
    """Print the plan for a model on 8 to 1,024 ranks, 8 a node."""
    model = describe(LlamaConfig(**SIZES[name]))
    found = {
        f"{sizes} over {sizes.shards} to {sizes.generation_pipeline}-{sizes.generation_tensor}": (
            sizes.world_size,
            planned(model, sizes),
        )
        for sizes in PLANNED[name]
    }
    rows(
        f"{name}: what one rank plans, 8 ranks a node; GB of bfloat16",
        ("p-t-d over shards to p_g-t_g", "ranks", "s", "parts", "collectives", "buffers", "a rank", "a node", "bound"),
        (
            (
                label,
                ranks,
                f"{of['seconds']:.2f}",
                of["parts"],
                of["collectives"],
                *(f"{of[cell] / 1e9:.2f}" for cell in ("buffers", "received", "enters_node", "bound_of_node")),
            )
            for label, (ranks, of) in found.items()
        ),
    )
    return {label: {"ranks": ranks, **of} for label, (ranks, of) in found.items()}


def projected(model_bytes: float, t: int, p: int, t_g: int) -> dict[Mode, Figures]:
    """Bytes into a GPU and seconds by the links alone, every GPU fetching for itself; machines have 8 GPUs, t = 8."""
    needed, own = {"HybridFlow": 1 / t_g, "HybridFlow-V": 1.0, "DS-Chat": 1.0}, 1 / (t * p)
    found: dict[Mode, Figures] = {}
    for mode in MODES:
        held = 1 / GPUS if mode == "DS-Chat" else own
        near = held * PER_MACHINE * (1 if mode != "HybridFlow" else 1 / t_g)
        inside, across = (near - held) * model_bytes, (needed[mode] - near) * model_bytes
        seconds = max(inside / NVLINK, across / (NETWORK / PER_MACHINE))
        found[mode] = {"received": inside + across, "seconds": seconds}
    return found


def rows(title: str, head: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """Print a table."""
    table = [[str(cell) for cell in line] for line in (head, *lines)]
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    print(f"\n{title}")
    for line in table:
        print("  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]))


def megabytes(value: float) -> str:
    return f"{value / 1e6:,.2f}"


def show(size: str, modes: dict[str, Figures], grown: dict[str, Figures]) -> None:
    """Print what was measured of a size on CPU."""
    columns = ("received", "sent", "training_shard", "generation", "buffers", "peak")
    rows(
        f"{size}, 1-4-2 to 1-2 on 8 ranks of this machine: MB of a rank (the largest)",
        ("mode", *columns, "collectives", "seconds"),
        ((m, *(megabytes(f[c]) for c in columns), f["collectives"], f"{f['seconds']:.3f}") for m, f in modes.items()),
    )
    rows(
        f"{size}, 1-2-d to 1-1: growth over d",
        ("replicas", "MB received by a rank", "MB by all", "seconds", "ns a byte of all"),
        (
            (
                d,
                megabytes(f["received"]),
                megabytes(f["total"]),
                f"{f['seconds']:.3f}",
                f"{f['nanoseconds_per_byte']:.3f}",
            )
            for d, f in grown.items()
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["27 M", "0.5 B"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--plan", action="store_true", help="plan for 8 to 1,024 ranks, and move nothing")
    options = parser.parse_args()
    found: Figures = {"plans": {name: plans(name) for name in PLANNED}} if options.plan else {}
    for size in [] if options.plan else options.sizes:
        found[size] = {"one_rank": one_rank(size, options.device)}
        if options.device == "cpu":
            found[size] |= {"modes": side_by_side(size), "growth": growth(size)}
            show(size, found[size]["modes"], found[size]["growth"])
        alone = found[size]["one_rank"]
        print(f"\n{size}, one rank on {options.device}: {alone['GBps']:.2f} GB/s; a copy {alone['copy_GBps']:.2f} GB/s")
    if not options.plan:
        found["model_of_fig_14"] = modelled()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def modelled() -> dict[str, dict[Mode, Figures]]:
    """The bytes of Fig. 14 over links, printed beside the paper's seconds."""
    found = {name: projected(*sizes[:4]) for name, sizes in FIG_14.items()}
    rows(
        f"Fig. 14 on {GPUS} GPUs: a MODEL of bytes over links (GB into a GPU, seconds), and the paper's seconds",
        ("model", *(f"{mode} {what}" for mode in MODES for what in ("GB", "s", "paper"))),
        (
            (
                name,
                *(cell for mode, paper in zip(MODES, FIG_14[name][4], strict=True) for cell in cells(of[mode], paper)),
            )
            for name, of in found.items()
        ),
    )
    return found


def cells(figures: Figures, paper: float) -> tuple[str, str, str]:
    return f"{figures['received'] / 1e9:.2f}", f"{figures['seconds']:.2f}", f"{paper:.1f}"


if __name__ == "__main__":
    main()
