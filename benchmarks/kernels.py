"""Writes the tables of measured kernels that the mapper reads: python benchmarks/kernels.py WHEEL [--check].

WHEEL is a wheel of aiconfigurator below 0.9 (PyPI, Apache-2.0), which holds what NVIDIA measured with vLLM and NCCL.
Written is operator/rlhf_mapper/kernels.json. Each table is a grid over two or three sizes in powers of two. Kernels of
a GPU are shares of its roofline, which is the larger of FLOPs / peak and bytes / bandwidth; collectives are seconds.
`--check` writes nothing and prints how far interpolation is off at all measured points.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rlhf_mapper import kernels

OUTPUT = Path(__file__).resolve().parents[1] / "operator/rlhf_mapper/kernels.json"
HEAD = 128
"""Size of the attention heads that were measured."""
ROWS = [2**power for power in range(14)]
SIDES = [2**power for power in range(7, 17)]
"""Grid of GEMMs: rows m; columns n and inner size k."""
GROUPS = [2**power for power in range(14)]
"""Grid of decode attention: KV heads of all sequences of a step together."""
CONTEXTS = [2**power for power in range(6, 18)]
HEADS = [2**power for power in range(13)]
"""Grid of prefill attention: query heads of all sequences together."""
LENGTHS = [2**power for power in range(4, 15)]
WIDTHS = [2**power for power in range(6, 14)]
"""Grid of a mixture's experts: tokens (ROWS), and width of an expert on one of its ranks."""
RANKS = [2, 4, 8]
MESSAGES = [2**power for power in range(8, 31)]
"""Bytes of a collective's whole tensor; of an all-to-all, of each rank."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "alltoall")
Row = Mapping[str, str]


@dataclass(frozen=True)
class System:
    """GPU type that was measured."""

    name: str
    """Name in the GPU table."""
    vllm: str
    nccl: str
    flops: float
    bandwidth: float


SYSTEMS: Mapping[str, System] = {
    "a100_sxm": System("a100-80g", "0.14.0", "2.27.3", 312e12, 2039e9),
    "h100_sxm": System("h100-80g", "0.14.0", "2.27.3", 989.4e12, 3350e9),
    "h200_sxm": System("h200-141g", "0.12.0", "2.26.2", 989.4e12, 4800e9),
    "b200_sxm": System("b200-180g", "0.16.0", "2.27.5", 2250e12, 7700e9),
    "gb200": System("gb200-186g", "0.14.0", "2.23", 2500e12, 8000e9),
    "l40s": System("l40s-48g", "0.14.0", "2.27.3", 362e12, 864e9),
}


def rows_of(wheel: zipfile.ZipFile, path: str) -> list[Row]:
    """Return the rows of a measurement file in the wheel."""
    return list(csv.DictReader(io.StringIO(wheel.read(f"aiconfigurator/systems/data/{path}_perf.txt").decode())))


def grid(points: Mapping[tuple[float, ...], float], axes: Sequence[Sequence[int]]) -> Any:
    """Return values at grid points: measured, else of the nearest measured point in logarithms."""
    places = np.log2(np.array(list(points)))
    values = np.array(list(points.values()))
    answer = np.empty([len(axis) for axis in axes])
    for index in product(*(range(len(axis)) for axis in axes)):
        at = np.log2([axis[place] for axis, place in zip(axes, index, strict=True)])
        away = np.abs(places - at).sum(1)
        answer[index] = math.exp(np.log(values[away <= away.min() + 1e-9]).mean())
    return answer


def gemms(rows: Iterable[Row], system: System) -> dict[tuple[float, ...], float]:
    """Return the share of the roofline by (m, n, k) of products in 16 bits."""
    shares: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for row in rows:
        m, n, k = (int(row[name]) for name in "mnk")
        if row["gemm_dtype"] == "float16" and min(n, k) >= SIDES[0]:
            least = max(2 * m * n * k / system.flops, 2 * (m * k + k * n + m * n) / system.bandwidth)
            shares[m, n, k].append(1e3 * least / float(row["latency"]))
    return {key: median(each) for key, each in shares.items()}


def decodes(rows: Iterable[Row], system: System) -> dict[tuple[float, ...], float]:
    """Return the share of the bandwidth by (KV heads of all sequences, tokens of a sequence); grouped queries."""
    shares: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for row in rows:
        heads, kv_heads, batch = (int(row[name]) for name in ("num_heads", "num_key_value_heads", "batch_size"))
        context = int(row["isl"]) + int(row["step"])
        if row["kv_cache_dtype"] == "float16" and 2 <= heads / kv_heads <= 8 and context >= CONTEXTS[0]:
            read = 4 * batch * kv_heads * HEAD * context
            shares[batch * kv_heads, context].append(1e3 * read / system.bandwidth / float(row["latency"]))
    return {key: median(each) for key, each in shares.items()}


def prefills(rows: Iterable[Row], system: System) -> dict[tuple[float, ...], float]:
    """Return the share of the peak by (query heads of all sequences, tokens of a sequence); causal attention."""
    shares: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for row in rows:
        heads, batch, length = int(row["num_heads"]), int(row["batch_size"]), int(row["isl"])
        if row["kv_cache_dtype"] == "float16" and length >= LENGTHS[0] and row["head_dim"] == str(HEAD):
            flops = 2 * batch * heads * HEAD * length**2
            shares[batch * heads, length].append(1e3 * flops / system.flops / float(row["latency"]))
    return {key: median(each) for key, each in shares.items()}


def experts(rows: Iterable[Row], system: System) -> dict[tuple[float, ...], float]:
    """Return the share of the roofline of all experts of a layer by (tokens, width of an expert on a rank)."""
    shares: dict[tuple[float, ...], list[float]] = defaultdict(list)
    names = ("num_tokens", "num_experts", "topk", "hidden_size", "inter_size", "moe_tp_size")
    for row in rows:
        tokens, count, chosen, hidden, width, ranks = (int(row[name]) for name in names)
        if row["moe_dtype"] == "float16" and row["moe_ep_size"] == "1":
            active = count * (1 - (1 - chosen / count) ** tokens)
            one = 3 * hidden * width / ranks
            least = max(2 * tokens * chosen * one / system.flops, 2 * active * one / system.bandwidth)
            shares[tokens, width / ranks].append(1e3 * least / float(row["latency"]))
    return {key: median(each) for key, each in shares.items()}


def collectives(rows: Iterable[Row], takes: Callable[[Row], bool]) -> dict[tuple[float, ...], float]:
    """Return seconds by (ranks, bytes of the whole tensor); the files count numbers of 2 bytes."""
    return {
        (int(row["num_gpus"]), 2 * int(row["message_size"])): 1e-3 * float(row["latency"]) for row in rows if takes(row)
    }


def tables_of(wheel: zipfile.ZipFile, folder: str) -> dict[str, tuple[Any, Sequence[Sequence[int]]]]:
    """Return (measured points, grid) of each table of a system."""
    system = SYSTEMS[folder]

    def measured(name: str) -> list[Row]:
        return rows_of(wheel, f"{folder}/vllm/{system.vllm}/{name}")

    nccl = rows_of(wheel, f"{folder}/nccl/{system.nccl}/nccl")
    ranks = [count for count in RANKS if any(row["num_gpus"] == str(count) for row in nccl)]
    return {
        "gemm": (gemms(measured("gemm"), system), (ROWS, SIDES, SIDES)),
        "decode": (decodes(measured("generation_attention"), system), (GROUPS, CONTEXTS)),
        "prefill": (prefills(measured("context_attention"), system), (HEADS, LENGTHS)),
        "experts": (experts(measured("moe"), system), (ROWS, WIDTHS)),
        "custom": (
            collectives(measured("custom_allreduce"), lambda row: row["backend"] == "vllm_graph"),
            (ranks, MESSAGES),
        ),
        **{
            name: (
                collectives(
                    nccl,
                    lambda row, name=name: row["op_name"] == name and row["nccl_dtype"] == "half",  # type: ignore[misc]
                ),
                (ranks, MESSAGES),
            )
            for name in COLLECTIVES
        },
    }


def check(wheel: zipfile.ZipFile) -> None:
    """Print how far each system's tables are off at all measured points, most of which lie between grid points."""
    for folder, system in SYSTEMS.items():
        said = []
        for name, (points, _) in tables_of(wheel, folder).items():
            table = next(each for each in kernels.measured() if each.gpu.name == system.name).tables[name]
            sizes = np.array(list(points)).T
            off = np.abs(table.at(*sizes) / np.array(list(points.values())) - 1)
            said.append(f"{name} {off.mean():.1%} ({np.quantile(off, 0.9):.0%})")
        print(f"{system.name}: mean error (nine of ten below): {', '.join(said)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    package, version = options.wheel.name.split("-")[:2]
    systems = {}
    with zipfile.ZipFile(options.wheel) as wheel:
        if options.check:
            check(wheel)
            return
        for folder, system in SYSTEMS.items():
            tables = {
                name: np.vectorize(lambda value: float(f"{value:.3g}"))(grid(points, axes)).tolist()
                for name, (points, axes) in tables_of(wheel, folder).items()
            }
            systems[system.name] = {"vllm": system.vllm, "nccl": system.nccl, **tables}
    document = {
        "source": f"{package} {version} on PyPI, aiconfigurator/systems/data",
        "license": "Apache-2.0, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES",
        "written_by": "benchmarks/kernels.py",
        "systems": systems,
    }
    text = json.dumps(document, separators=(",", ":"))
    OUTPUT.write_text(text + "\n")
    print(f"{OUTPUT.name}: {len(text):,} bytes")


if __name__ == "__main__":
    main()
