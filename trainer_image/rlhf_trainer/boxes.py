"""Boxes: n-dimensional slices of a tensor, by which one layout is compared with another."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """The elements [starts[i], stops[i]) of every dim i of a tensor."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def cut(self, dim: int, start: int, stop: int) -> Box:
        """The part of this box from `start` to `stop` of a dim, counted in the tensor."""
        starts, stops = list(self.starts), list(self.stops)
        starts[dim] = max(starts[dim], start)
        stops[dim] = max(starts[dim], min(stops[dim], stop))
        return Box(tuple(starts), tuple(stops))

    def intersection(self, other: Box) -> Box | None:
        """What both hold; None if that is nothing."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Box(starts, stops) if all(map(int.__lt__, starts, stops)) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds `outer`."""
        return tuple(
            slice(start - first, stop - first)
            for start, stop, first in zip(self.starts, self.stops, outer.starts, strict=True)
        )
