"""N-dimensional slices of a tensor, with which shards of two layouts are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Slice of a tensor: the elements [starts[i], stops[i]) of every dim i."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> TensorSlice:
        """Return the slice that covers a whole tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def cut(self, dim: int, start: int, stop: int) -> TensorSlice:
        """Return the part of this slice between two indices of the whole tensor's dim `dim`; empty if disjoint."""
        starts, stops = list(self.starts), list(self.stops)
        starts[dim] = max(starts[dim], start)
        stops[dim] = max(starts[dim], min(stops[dim], stop))
        return TensorSlice(tuple(starts), tuple(stops))

    def chunk(self, dim: int, index: int, count: int) -> TensorSlice:
        """Return part `index` of the `count` parts of torch.chunk along a dim; empty where torch makes fewer parts."""
        first, stop = self.starts[dim], self.stops[dim]
        size = -(-(stop - first) // count)
        start = min(first + index * size, stop)
        return self.cut(dim, start, min(start + size, stop))

    def intersection(self, other: TensorSlice) -> TensorSlice | None:
        """Return the slice of the elements that are in both slices; None if there are none."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return TensorSlice(starts, stops) if all(map(int.__lt__, starts, stops)) else None

    def moved(self, by: Sequence[int]) -> TensorSlice:
        """Return the slice shifted by `by` elements in each dim."""
        starts, stops = (tuple(map(int.__add__, ends, by)) for ends in (self.starts, self.stops))
        return TensorSlice(starts, stops)

    def on_layer(self, number: int) -> TensorSlice:
        """Return the slice of a stack [layers, ...] that is this slice of the layer with index `number`."""
        return TensorSlice((number, *self.starts), (number + 1, *self.stops))

    def off_layer(self) -> TensorSlice:
        """Return the slice without its first dim, the layer of a stack; the inverse of `on_layer`."""
        return TensorSlice(self.starts[1:], self.stops[1:])

    def within(self, outer: TensorSlice) -> tuple[slice, ...]:
        """Return the index of this slice in a local tensor that holds the elements of `outer`."""
        return tuple(
            slice(start - first, stop - first)
            for start, stop, first in zip(self.starts, self.stops, outer.starts, strict=True)
        )


WeightSlice = tuple[str, TensorSlice, Tensor]
"""Part of a parameter: (Hugging Face name of the parameter, slice of the parameter, elements of the slice)."""
