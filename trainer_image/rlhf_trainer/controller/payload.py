"""Counts the tensor and array bytes that the controller process itself (de)serialises: the design says 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray

SMALL = (str, bytes, int, float, range, slice, type(None))
"""Types that hold no tensor, and are most of what is sent; they come first, for the other questions are slow."""


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors and arrays inside a value, through containers and dataclasses."""
    if isinstance(value, SMALL):
        return 0
    import torch

    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return sum(map(tensor_bytes, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return sum(tensor_bytes(getattr(value, part.name)) for part in dataclasses.fields(value))
    return 0


class PayloadMeter:
    """Tensor bytes that went through Ray's serialiser in this process since the last reading."""

    def __init__(self) -> None:
        self._bytes = 0

    def read(self) -> int:
        """Bytes since the last reading."""
        counted, self._bytes = self._bytes, 0
        return counted

    @contextmanager
    def watching(self) -> Iterator[PayloadMeter]:
        """Count in this process while the block runs: arguments and `ray.put` going out, `ray.get` coming in."""
        context = ray._private.worker.global_worker.get_serialization_context()  # noqa: SLF001 there is no public hook
        serialize, deserialize = context.serialize, context.deserialize_objects

        def counted_serialize(value: Any) -> Any:
            self._bytes += tensor_bytes(value)
            return serialize(value)

        def counted_deserialize(*args: Any, **kwargs: Any) -> Any:
            values = deserialize(*args, **kwargs)
            self._bytes += tensor_bytes(values)
            return values

        context.serialize, context.deserialize_objects = counted_serialize, counted_deserialize
        try:
            yield self
        finally:
            context.serialize, context.deserialize_objects = serialize, deserialize
