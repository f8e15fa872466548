"""What a transition from training to generation moves, holds and takes: python benchmarks/reshard.py [--json PATH].

The three modes side by side on 8 ranks (1-4-2 to 1-2-2-2), growth over the data-parallel replicas (1-2-d to 1-1), and
the copy limit of one rank. Ranks are processes of this machine, joined by gloo; weights are float32 in training and
bfloat16 on the wire. Bytes are counted where the collectives are called; each time is the median of a few transitions,
from a barrier to the last rank. With --device cuda only the one rank is measured, on the GPU. Needs torch, transformers
and pydantic. The projection to Fig. 14 of the paper is a model of bytes over links, not a measurement.
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

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.hybrid_engine.exchange import Exchange
from rlhf_trainer.hybrid_engine.layout import Parameter, Shards, describe
from rlhf_trainer.tensor_slice import WeightSlice
from tests.trainer.hybrid_engine.baselines import MODES, Mode, Transition, transition

SIZES: dict[str, dict[str, Any]] = {
    "27 M": {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "0.5 B": {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "7 B": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "tie_word_embeddings": False,
    },
}
WIRE = torch.bfloat16
BUFFER_BYTES = 64 << 20
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
    """What the generator does with the pieces; its memory is allocated before anything is measured."""
    slices = way.plan.destinations[rank]
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
    weights = {name: torch.ones(part.shape, device=device) for name, part in way.plan.sources[rank].items()}
    exchange = Exchange(way.plan, model, dtype=WIRE, buffer_bytes=BUFFER_BYTES, device=device)
    take = consumer(trial, way, rank, device)
    seconds = timed(lambda: take(exchange.pieces(weights)), device)
    traffic, own = exchange.stats, bytes_of(way.plan.sources[rank], torch.float32)
    assert traffic.received == way.plan.received(rank) * WIRE.itemsize
    figures: Figures = {
        "received": traffic.received,
        "sent": traffic.sent,
        "collectives": traffic.collectives,
        "seconds": seconds,
        "buffers": traffic.buffers,
        "training_shard": own,
        "generation": bytes_of(way.plan.destinations[rank], WIRE),
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
    options = parser.parse_args()
    found: Figures = {}
    for size in options.sizes:
        found[size] = {"one_rank": one_rank(size, options.device)}
        if options.device == "cpu":
            found[size] |= {"modes": side_by_side(size), "growth": growth(size)}
            show(size, found[size]["modes"], found[size]["growth"])
        alone = found[size]["one_rank"]
        print(f"\n{size}, one rank on {options.device}: {alone['GBps']:.2f} GB/s; a copy {alone['copy_GBps']:.2f} GB/s")
    found["model_of_fig_14"] = {name: projected(*sizes[:4]) for name, sizes in FIG_14.items()}
    rows(
        f"Fig. 14 on {GPUS} GPUs: a MODEL of bytes over links (GB into a GPU, seconds), and the paper's seconds",
        ("model", *(f"{mode} {what}" for mode in MODES for what in ("GB", "s", "paper"))),
        (
            (
                name,
                *(cell for mode, paper in zip(MODES, FIG_14[name][4], strict=True) for cell in cells(of[mode], paper)),
            )
            for name, of in found["model_of_fig_14"].items()
        ),
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def cells(figures: Figures, paper: float) -> tuple[str, str, str]:
    return f"{figures['received'] / 1e9:.2f}", f"{figures['seconds']:.2f}", f"{paper:.1f}"


if __name__ == "__main__":
    main()
