"""Counts the bytes of live tensors by device and kind, their peak, and the collectives that were called."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.tensor import DTensor

PARAMETERS, MOMENTS, GRADIENTS = "parameters", "moments", "gradients"
GATHERED, LOGITS, ACTIVATIONS = "gathered parameters", "logits", "activations"
GENERATOR, BUFFERS = "generator", "buffers"
KINDS = (PARAMETERS, MOMENTS, GRADIENTS, GATHERED, LOGITS, ACTIVATIONS, BUFFERS, GENERATOR)
"""Activations are all that is nothing else: what the backward pass needs, and what a layer computes with."""
GPU, HOST = "gpu", "cpu"


@dataclass
class Phase:
    """What was measured in a phase of the step."""

    peak: int = 0
    """Bytes on the GPU."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Kind -> bytes at that moment."""
    host_peak: int = 0
    largest: int = 0
    """Bytes of the largest single allocation, on GPU or host."""
    after: int = 0
    """Bytes on the GPU when the phase ends."""
    host_after: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    """Name -> number of calls."""
    collective_bytes: Counter[str] = field(default_factory=Counter)
    """Name -> bytes of its largest side (gathered, or before it is scattered)."""
    waits: int = 0
    """Values that the host reads from the GPU, each a synchronisation."""


@dataclass
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    device: str
    kind: str
    size: int


class LiveBytes:
    """The storages that are alive. Kinds are given when a storage is made, and by `mark`."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self.now: Counter[str] = Counter()
        """Device -> bytes."""
        self.kinds: Counter[str] = Counter()
        """Kind -> bytes on the GPU."""
        self.phases: dict[str, Phase] = {}
        self.phase = Phase()
        self.weight_shapes: set[tuple[int, ...]] = set()
        """Of weights as a rank computes with them: a tensor of such a shape made in a backward pass is a gradient."""
        self.vocabulary: set[int] = set()
        """Lengths of the last axis of logits."""

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """A phase; its peak counts from here. A name may come again: the larger peak is kept, calls are added."""
        outer, self.phase = self.phase, self.phases.setdefault(name, Phase())
        self._note()
        try:
            yield
        finally:
            self.phase.after, self.phase.host_after = self.now[GPU], self.now[HOST]
            self.phase = outer

    def seen(self, tensor: Tensor) -> None:
        """A tensor that an operation returned."""
        if isinstance(tensor, DTensor):  # a wrapper, whose own storage holds nothing
            return
        storage = tensor.untyped_storage()
        found = self._storages.get(storage._cdata)
        if found and found.reference() is not None:
            self.resized(storage)
            return
        if found:
            self._forget(storage._cdata, found)
        device = HOST if tensor.device.type == HOST else GPU
        entry = _Storage(weakref.ref(storage), device, self._kind(tensor), 0)
        key = storage._cdata
        entry.reference = weakref.ref(storage, lambda _: self._gone(key, entry))
        self._storages[key] = entry
        self._add(entry, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage whose size may have changed: FSDP2 and offload empty and fill storages in place."""
        if found := self._storages.get(storage._cdata):
            self._add(found, storage.nbytes() - found.size)

    def mark(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Say what tensors are."""
        for tensor in tensors:
            if tensor is None:
                continue
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            found = self._storages.get(local.untyped_storage()._cdata)
            if found:
                size = found.size
                self._add(found, -size)
                found.kind = kind
                self._add(found, size)

    def called(self, func: Any, out: Any, args: Any, kwargs: Any) -> None:
        """A collective that was called."""
        if func not in collective_ops or func in sync_ops:
            return
        name = func._schema.name.partition("::")[2].strip("_")
        self.phase.collectives[name] += 1
        self.phase.collective_bytes[name] += CollectiveOp.get_comm_tensor_size(func, out, args, kwargs)
        if "gather" in name:
            self.mark([each for each in (out, args[0]) if isinstance(each, Tensor)], GATHERED)
        if "reduce_scatter" in name:
            self.mark([each for each in (*args[:2], out) if isinstance(each, Tensor)], GRADIENTS)

    def _kind(self, tensor: Tensor) -> str:
        shape = tuple(tensor.shape)
        if torch._C._current_graph_task_id() >= 0 and shape in self.weight_shapes:
            return GRADIENTS
        return LOGITS if shape and shape[-1] in self.vocabulary else ACTIVATIONS

    def _add(self, entry: _Storage, size: int) -> None:
        if not size:
            return
        entry.size += size
        self.now[entry.device] += size
        if entry.device == GPU:
            self.kinds[entry.kind] += size
        self.phase.largest = max(self.phase.largest, size)
        self._note()

    def _note(self) -> None:
        if self.now[GPU] > self.phase.peak:
            self.phase.peak, self.phase.kinds = self.now[GPU], dict(+self.kinds)
        self.phase.host_peak = max(self.phase.host_peak, self.now[HOST])

    def _gone(self, key: int, entry: _Storage) -> None:
        if self._storages.get(key) is entry:
            self._forget(key, entry)

    def _forget(self, key: int, entry: _Storage) -> None:
        del self._storages[key]
        self._add(entry, -entry.size)
