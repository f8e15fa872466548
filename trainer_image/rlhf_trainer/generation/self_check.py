"""Checks before training that vLLM keeps each parameter where `weight_layout` says; refuses a version that does not.

While the engine starts, vLLM's own loader is given probe tensors, whose elements follow from their row and column, for
one decoder layer and all parameters outside of the layers. Nothing is packed yet, and no forward pass is needed.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any
from unittest.mock import patch

import torch
import vllm
from torch import Tensor, nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.generation.weight_layout import RENAMED, ParameterLocation, locations_of


@contextmanager
def layout_checked() -> Iterator[None]:
    """Check the weight layout of an engine that starts with `load_format="dummy"` in this block."""
    original = DummyModelLoader.load_weights

    def checked(loader: DummyModelLoader, model: nn.Module, model_config: Any) -> None:
        check(model)
        original(loader, model, model_config)
        for module in model.modules():
            for scale in module.parameters(recurse=False) if isinstance(module, AttentionLayerBase) else ():
                scale.data.fill_(1.0)  # the loader has made the scale of an FP8 cache random

    with patch.object(DummyModelLoader, "load_weights", checked):
        yield


@torch.no_grad()
def check(model: Any) -> None:
    """Load test values into a vLLM model, and check that its parameters are where the trainer writes them.

    The check overwrites the first layer and all weights outside layers. EnvironmentProblem if a parameter is elsewhere.
    """
    every = locations_of(model)
    _require_no_gaps(every)
    layers = {name: found.group(1) for name in every if (found := re.search(r"\.layers\.(\d+)\.", name))}
    first = min(layers.values(), key=int, default="")
    locations = {name: location for name, location in every.items() if layers.get(name, first) == first}
    for location in locations.values():
        tensor = getattr(location.module, location.attribute).data
        tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 0)
    dtypes = {name: location.view().dtype for name, location in locations.items()}
    try:
        stored = (part for name, each in locations.items() for part in _stored(model, name, each, dtypes[name]))
        model.load_weights(stored)
    except Exception as error:
        problem = f"vLLM {vllm.__version__} does not load parameters of these names and shapes"
        raise EnvironmentProblem(f"{problem}: {' '.join(str(error).split())[:300]}") from error
    for name, location in locations.items():
        view, shard = location.view(), location.shard
        whole = tuple(map(slice, shard.starts, shard.stops))
        expected = probe(name, location.shape)[whole].to(view.dtype)
        if view.shape != shard.shape or not torch.equal(view.cpu(), expected):
            raise EnvironmentProblem(
                f"vLLM {vllm.__version__} keeps {name} elsewhere than this trainer writes it, "
                "so its weights cannot be updated"
            )


def probe(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return test values of a parameter: an element is the xor of a random byte per dim; uint8, exact in any dtype."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    axes = [torch.randint(256, (size,), dtype=torch.uint8, generator=generator, device="cpu") for size in shape]
    return reduce(torch.bitwise_xor, torch.meshgrid(axes, indexing="ij"))


def _stored(
    model: nn.Module, name: str, location: ParameterLocation, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of the tensors of a model's files that make up a parameter; each expert has its own."""
    values, module = probe(name, location.shape).to(dtype), location.module
    in_vllm, in_transformers = RENAMED.get(type(model).__name__, ("", ""))
    stored = name.replace(in_transformers, in_vllm)
    if not isinstance(module, RoutedExperts):
        yield stored, values
        return
    gates = module.ckpt_gate_proj_name, module.ckpt_up_proj_name
    for expert, own in enumerate(values):
        for kind, part in zip(gates, own, strict=True) if own.ndim == 3 else [(module.ckpt_down_proj_name, own)]:
            yield f"{stored.rpartition('.')[0]}.{expert}.{kind}.weight", part


def _require_no_gaps(locations: dict[str, ParameterLocation]) -> None:
    """Raise EnvironmentProblem unless `locations` cover all rows of vLLM's tensors except a vocabulary's padding."""
    rows: Counter[tuple[nn.Module, str]] = Counter()
    for location in locations.values():
        rows[location.module, location.attribute] += location.rows
    for name, location in locations.items():
        there = len(getattr(location.module, location.attribute))
        known = rows[location.module, location.attribute]
        if known > there or (known < there and not isinstance(location.module, VocabParallelEmbedding)):
            raise EnvironmentProblem(
                f"vLLM {vllm.__version__} keeps {there} rows where {name} lies, and this trainer knows {known} of them"
            )
