"""Measured kernels of GPUs: products of matrices, attention and collectives, interpolated in logarithms of sizes.

`kernels.json` names its source; `benchmarks/kernels.py` writes it. A GPU that was not measured takes the shares of the
roofline of the GPU with the most similar figures.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rlhf_mapper.hardware import GPUS, Gpu

Numbers = NDArray[np.float64]
Collective = Literal["custom", "all_reduce", "all_gather", "reduce_scatter", "alltoall"]
"""Collective of NCCL, or vLLM's own all-reduce (custom)."""
FIRST: Mapping[str, tuple[int, ...]] = {
    "gemm": (0, 7, 7),  # rows m, columns n, inner size k
    "decode": (0, 6),  # KV heads of all sequences, tokens of a sequence
    "prefill": (0, 4),  # query heads of all sequences, tokens of a sequence
    "experts": (0, 6),  # tokens, width of an expert on a rank
    **dict.fromkeys(get_args(Collective), (1, 8)),  # ranks, bytes of the tensor; of an all-to-all, of each rank
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
        corners: list[tuple[Any, Any]] = [(0, None)]
        flat, item = self.logs.ravel(), self.logs.itemsize
        for length, width, first, size in zip(self.logs.shape, self.logs.strides, self.first, sizes, strict=True):
            stride = width // item
            place = np.minimum(np.maximum(np.log2(np.maximum(size, 1e-9)) - first, 0.0), length - 1.0)
            below = np.minimum(place.astype(np.int64), length - 2) if length > 1 else place.astype(np.int64)
            above, at = place - below, below * stride
            ways = [(at, 1 - above), (at + stride, above)] if np.count_nonzero(above) else [(at, None)]
            corners = [
                (begin + step, part if share is None else share if part is None else share * part)
                for begin, share in corners
                for step, part in ways
            ]
        each = [flat[at] if share is None else share * flat[at] for at, share in corners]
        found: Numbers = np.exp2(sum(each[1:], each[0]))
        return found


@dataclass(frozen=True, eq=False)
class Measured:
    """Kernels of one GPU type."""

    gpu: Gpu
    tables: Mapping[str, Table]
    """Shares of the roofline, and seconds of collectives."""


@cache
def measured() -> tuple[Measured, ...]:
    """Return all measured GPU types."""
    document = json.loads(resources.files(__package__).joinpath("kernels.json").read_text(encoding="utf-8"))
    return tuple(
        Measured(
            GPUS[name],
            {table: Table(np.log2(np.array(system[table], order="C")), first) for table, first in FIRST.items()},
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
    return roofline / nearest(gpu).tables["gemm"].at(rows, columns, inner)


@cache
def collective_seconds(link: float, kind: Collective) -> Table:
    """Return the seconds of a collective in a node, by (ranks, bytes of the whole tensor).

    link: bytes/s of a GPU, one direction. Between two measured links seconds are interpolated in logarithms. For other
    links the seconds beyond the shortest message's scale with 1 / link. Ranks beyond the table add latency.
    """
    by_link = {each.gpu.link_bandwidth / 2: each for each in reversed(measured())}
    slower = max((each for each in by_link if each <= link), default=min(by_link))
    faster = min((each for each in by_link if each >= link), default=slower)
    if slower == faster:
        return _stretched(by_link[slower].tables[kind], slower / link)
    ends = [_stretched(by_link[each].tables[kind], 1.0).logs for each in (slower, faster)]
    share = np.log(link / slower) / np.log(faster / slower)
    return Table((1 - share) * ends[0] + share * ends[1], (0, 8))


def _stretched(table: Table, factor: float) -> Table:
    """Return a collective for 1 to 256 ranks on a link slower than the measured one by `factor`."""
    ranks: Numbers = np.exp2(np.arange(9.0))[:, None]
    bytes_: Numbers = np.exp2(np.arange(8.0, 40.0))
    known, most = (2.0 ** (first + size - 1) for first, size in zip(table.first, table.logs.shape, strict=True))
    shortest = table.at(ranks, bytes_[0])
    more = (table.at(ranks, bytes_) - shortest) * np.maximum(bytes_ / most, 1.0)
    seconds = shortest * np.maximum(ranks / known, 1.0) + np.where(more > 0, more * factor, more)  # some were faster
    return Table(np.log2(seconds), (0, 8))
