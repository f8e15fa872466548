"""Measured kernels of GPUs: products of matrices, attention and collectives, interpolated in logarithms of sizes.

`kernels.json` names its source; `benchmarks/kernels.py` writes it. A GPU that was not measured takes the shares of the
roofline of the GPU with the most similar figures.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlhf_mapper.hardware import GPUS, Gpu

Numbers = NDArray[np.float64]
Collective = Literal["custom", "all_reduce", "all_gather", "reduce_scatter"]
"""Collective of NCCL, or vLLM's own all-reduce (custom)."""
FIRST: Mapping[str, tuple[int, ...]] = {
    "gemm": (0, 7, 7),  # rows m, columns n, inner size k
    "decode": (0, 6),  # KV heads of all sequences, tokens of a sequence
    "prefill": (0, 4),  # query heads of all sequences, tokens of a sequence
    "experts": (0, 6),  # tokens, width of an expert on a rank
    **dict.fromkeys(("custom", "all_reduce", "all_gather", "reduce_scatter"), (1, 8)),  # ranks, bytes of the tensor
}
"""Table -> power of two of the first grid point of each axis."""


@dataclass(frozen=True, eq=False)
class Table:
    """Positive values on a grid over two or three sizes in powers of two; sizes beyond the grid count as its edge."""

    logs: Numbers
    """Logarithms (base 2) of the values."""
    first: tuple[int, ...]
    """Power of two of the first grid point of each axis."""

    def at(self, *sizes: Numbers | float) -> Numbers:
        """Return the values at sizes, which broadcast against each other."""
        found: Numbers = np.exp2(self._mixed(self.logs, [np.log2(size) for size in sizes]))
        return found

    def _mixed(self, logs: Numbers, powers: list[Numbers]) -> Numbers:
        """Interpolate linearly along one axis after the other."""
        places = []
        for length, first, power in zip(logs.shape, self.first, powers, strict=True):
            place = np.clip(power - first, 0, length - 1)
            below = np.minimum(place.astype(int), max(length - 2, 0))
            places.append((below, place - below))
        mixed: Numbers = np.zeros(())
        for corner in np.ndindex(*(min(length, 2) for length in logs.shape)):
            share: Numbers = np.ones(())
            for (_, above), step in zip(places, corner, strict=True):
                share = share * (above if step else 1 - above)
            at = tuple(below + step for (below, _), step in zip(places, corner, strict=True))
            mixed = mixed + share * logs[at]
        return mixed


@dataclass(frozen=True, eq=False)
class Measured:
    """Kernels of one GPU type."""

    gpu: Gpu
    """The GPU that was measured."""
    tables: Mapping[str, Table]
    """Shares of the roofline, and seconds of collectives."""


@cache
def measured() -> tuple[Measured, ...]:
    """Return all measured GPU types."""
    document = json.loads(resources.files(__package__).joinpath("kernels.json").read_text(encoding="utf-8"))
    return tuple(
        Measured(
            GPUS[name],
            {
                table: Table(np.log2(np.array(system[table])), first)
                for table, first in FIRST.items()
            },
        )
        for name, system in document["systems"].items()
    )


@cache
def nearest(gpu: Gpu) -> Measured:
    """Return the measured GPU type with the most similar peak and memory bandwidth."""

    def distance(other: Measured) -> float:
        ratios = other.gpu.bf16 / gpu.bf16, other.gpu.memory_bandwidth / gpu.memory_bandwidth
        return float(np.abs(np.log(ratios)).sum())

    return min(measured(), key=distance)


def product_seconds(gpu: Gpu, rows: Numbers, columns: Numbers, inner: Numbers) -> Numbers:
    """Return the seconds of a product [rows, inner] x [inner, columns] in 16 bits."""
    flops = 2 * rows * columns * inner
    bytes_ = 2 * (rows * inner + inner * columns + rows * columns)
    roofline = np.maximum(flops / gpu.bf16, bytes_ / gpu.memory_bandwidth)
    seconds: Numbers = roofline / nearest(gpu).tables["gemm"].at(rows, columns, inner)
    return seconds


def collective_seconds(gpu: Gpu, link: float, kind: Collective, ranks: Numbers, bytes_: Numbers) -> Numbers:
    """Return the seconds of a collective in a node. link: bytes/s of a GPU, one direction; bytes_: the whole tensor.

    A link of another speed than the measured one stretches what exceeds the shortest message; more ranks than were
    measured add a step of latency each.
    """
    source = min(measured(), key=lambda each: abs(np.log(each.gpu.link_bandwidth / 2 / link)))
    table = source.tables[kind]
    least, most = 2.0 ** table.first[1], 2.0 ** (table.first[1] + table.logs.shape[1] - 1)
    shortest = table.at(ranks, least)
    stretched = (table.at(ranks, bytes_) - shortest) * np.maximum(bytes_ / most, 1.0)
    known = 2.0 ** (table.first[0] + table.logs.shape[0] - 1)
    seconds: Numbers = shortest * np.maximum(ranks / known, 1.0) + stretched * source.gpu.link_bandwidth / 2 / link
    return seconds
