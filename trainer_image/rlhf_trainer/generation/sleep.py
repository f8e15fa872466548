"""On CPU, where vLLM has no sleep mode: its cache and weights give their memory back while the actor trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase

Emptied = list[tuple[torch.UntypedStorage, int]]
"""(storage, bytes that it had)."""


def bytes_held(model: nn.Module, caches: Iterable[Tensor]) -> int:
    """Bytes of the key and value cache and of the weights, with the packed copies of linears and of the head."""
    plain = sum(storage.nbytes() for storage in _storages([*model.parameters(), *caches]))
    return plain + sum(map(_packed_bytes, model.modules()))


def empty(tensors: Iterable[Tensor]) -> Emptied:
    """Free the memory of these tensors, which stay what they are for all who look into them."""
    emptied = [(storage, storage.nbytes()) for storage in _storages(tensors)]
    for storage, _ in emptied:
        storage.resize_(0)
    return emptied


def drop_packed(model: nn.Module) -> None:
    """Free the packed copies; the next update packs anew."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = None


def fill(emptied: Emptied) -> None:
    """Give the tensors memory again, all zero: a masked position of the cache must not be a NaN."""
    for storage, size in emptied:
        storage.resize_(size)
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once, without empty ones."""
    found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in found.values() if storage.nbytes()]


def _packed_bytes(module: Any) -> int:
    if getattr(module, "cpu_linear", None) is None:
        return 0
    if not isinstance(module, LinearBase):  # a head, whose plain weight is there too
        return int(module.weight.nbytes)
    if module.weight.numel():  # vLLM could not pack it
        return 0
    return int(module.output_size_per_partition * module.input_size_per_partition * module.params_dtype.itemsize)
