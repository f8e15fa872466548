"""Counts the tensor and array bytes that the controller process itself (de)serialises: the design says 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import ray

SMALL = {str, bytes, bool, int, float, range, slice, type(None)}
"""Types without tensors, which most sent values have; they are tested first, as the other tests are slow."""


@cache
def field_names(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields; empty for any other class."""
    return tuple(part.name for part in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def tensor_bytes(value: object) -> int:
    """Return the bytes of all tensors and arrays inside a value, through containers and dataclasses."""
    counted = 0
    rest: list[Any] = [value]
    while rest:
        each = rest.pop()
        kind = each.__class__
        if kind in SMALL:
            continue
        if names := field_names(kind):
            rest += [getattr(each, name) for name in names]
        elif isinstance(each, list | tuple | set | frozenset):
            rest += each
        elif isinstance(each, Mapping):
            rest += each.values()
        elif isinstance(each, np.ndarray):
            counted += int(each.nbytes)
        else:
            import torch

            if isinstance(each, torch.Tensor):
                counted += each.numel() * each.element_size()
    return counted


class PayloadMeter:
    """Meter of the tensor bytes that go through Ray's serialiser in this process."""

    def __init__(self) -> None:
        self._bytes = 0

    def read(self) -> int:
        """Return the tensor bytes that went through Ray's serialiser in this process since the last call of `read`."""
        counted, self._bytes = self._bytes, 0
        return counted

    @contextmanager
    def watching(self) -> Iterator[PayloadMeter]:
        """Count the tensor bytes of this process while the block runs: arguments and `ray.put` out, `ray.get` in."""
        context = ray._private.worker.global_worker.get_serialization_context()  # noqa: SLF001 there is no public hook
        serialize, deserialize = context.serialize, context.deserialize_objects

        def counted_serialize(value: object) -> object:
            self._bytes += tensor_bytes(value)
            return serialize(value)

        def counted_deserialize(*args: object, **kwargs: object) -> object:
            values = deserialize(*args, **kwargs)
            self._bytes += tensor_bytes(values)
            return values

        context.serialize, context.deserialize_objects = counted_serialize, counted_deserialize
        try:
            yield self
        finally:
            context.serialize, context.deserialize_objects = serialize, deserialize
