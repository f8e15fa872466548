"""One rank of a world of many: torch's fake process group, a fake GPU, and model folders whose weights take no disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlhf_trainer.stored_tensors import LocalFile
from rlhf_trainer.training import accumulation, distributed, sharding
from tests.real_size.fake_gpu import fake_gpu
from tests.real_size.live_bytes import GPU, HOST, LiveBytes
from tests.real_size.shapes import GPU_BYTES

TOKENIZER = Path(__file__).parents[2] / "examples" / "rlhf_examples" / "helpful" / "model"
FAKE = dist.Backend.FAKE
READ = LocalFile.read
FILE_BYTES = 5 * 10**9
"""The most of a file of weights, as on the hub; a file that is larger than the memory cannot be mapped."""

if GPU not in dist.Backend.backend_capability[FAKE]:
    dist.Backend.backend_capability[FAKE].append(GPU)


@contextmanager
def rank_of_world(ranks: int, live: LiveBytes, *, rank: int = 0) -> Iterator[None]:
    """The block is one of `ranks` ranks, each with a fake GPU; other ranks are imagined."""
    real = distributed.device_here.__code__
    dist.init_process_group(f"cpu:{FAKE},{GPU}:{FAKE}", store=FakeStore(), rank=rank, world_size=ranks)
    distributed.device_here.__code__ = (lambda: torch.device("gpu", 0)).__code__  # it is imported by name
    threads = torch.autograd.is_multithreading_enabled()
    try:
        with (
            fake_gpu(live),
            patch.object(sharding, "fully_shard", _sharded),
            patch.object(accumulation, "device_memory", lambda: GPU_BYTES),
            patch.object(LocalFile, "read", _read),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield
    finally:
        torch.autograd.set_multithreading_enabled(threads)
        distributed.device_here.__code__ = real
        dist.destroy_process_group()


def _read(file: LocalFile, name: str, index: tuple[slice, ...]) -> Tensor:
    """The product's reading, uncounted: a file is mapped into memory, not held."""
    with _disable_current_modes():
        return READ(file, name, index)


def _sharded(module: nn.Module, **options: Any) -> Any:
    """FSDP2, after norms and buffers have moved: they are real, and their data cannot become a fake tensor's."""
    for each in module.modules():
        for name, weight in each._parameters.items():
            if weight is not None and weight.device.type == HOST and not isinstance(weight, DTensor):
                each._parameters[name] = nn.Parameter(weight.detach().to(GPU), weight.requires_grad)
        for name, buffer in each._buffers.items():
            each._buffers[name] = None if buffer is None else buffer.to(GPU)
    return fully_shard(module, **options)


def model_folder(folder: Path, config: PreTrainedConfig, *, labels: int | None = None) -> str:
    """A model folder as it is downloaded: config, tokenizer and bfloat16 weights, all 0, in sparse files.

    labels: of a sequence classifier; None: a language model.
    """
    with torch.device("meta"):
        model = _classifier(config, labels) if labels else AutoModelForCausalLM.from_config(config)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(TOKENIZER)).save_pretrained(folder)
    tied = bool(model.config.tie_word_embeddings) and not labels
    files: list[dict[str, nn.Parameter]] = [{}]
    for name, weight in model.named_parameters():
        assert not (tied and name == "lm_head.weight")
        if sum(map(_bytes, files[-1].values())) + _bytes(weight) > FILE_BYTES:
            files.append({})
        files[-1][name] = weight
    place = {}
    for number, weights in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        _write(folder / file, weights)
        place.update(dict.fromkeys(weights, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return str(folder)


def _bytes(weight: Tensor) -> int:
    return 2 * weight.numel()


def _write(path: Path, weights: Mapping[str, Tensor]) -> None:
    """A sparse safetensors file of bfloat16 zeros."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, weight in weights.items():
        end = start + _bytes(weight)
        head[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(head).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + start)


def _classifier(config: PreTrainedConfig, labels: int) -> PreTrainedModel:
    own = type(config)(**{**config.to_dict(), "num_labels": labels})
    return AutoModelForSequenceClassification.from_config(own)
