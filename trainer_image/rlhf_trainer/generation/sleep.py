"""vLLM's sleep mode for CPU, which vLLM has for GPUs only: frees cache and weights while the actor trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase

from rlhf_trainer.generation.weight_layout import linear_size

FreedStorages = list[tuple[torch.UntypedStorage, int]]
"""Freed storages of tensors, each with the number of bytes that it had."""


def bytes_held(model: nn.Module, caches: Iterable[Tensor]) -> int:
    """Count bytes of cache and weights, with packed copies of linear layers and head; experts are packed in place."""
    plain = sum(storage.nbytes() for storage in _storages([*model.parameters(), *caches]))
    return plain + sum(map(_packed_bytes, model.modules()))


def free(tensors: Iterable[Tensor]) -> FreedStorages:
    """Free the memory of these tensors; the tensors and their views stay usable after `allocate`."""
    freed = [(storage, storage.nbytes()) for storage in _storages(tensors)]
    for storage, _ in freed:
        storage.resize_(0)
    return freed


def drop_packed(model: nn.Module) -> None:
    """Free the packed copies of a model's weights for vLLM's CPU kernels; the next update packs anew."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = None


def allocate(freed: FreedStorages) -> None:
    """Give freed storages memory again, all zero: a masked position of the KV cache must not be a NaN."""
    for storage, size in freed:
        storage.resize_(size)
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once, without empty storages."""
    found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in found.values() if storage.nbytes()]


def _packed_bytes(module: Any) -> int:
    if getattr(module, "cpu_linear", None) is None:
        return 0
    if not isinstance(module, LinearBase):  # a head, whose plain weight is there too
        return int(module.weight.nbytes)
    if module.weight.numel():  # vLLM could not pack it
        return 0
    return prod(linear_size(module)) * int(module.params_dtype.itemsize)
