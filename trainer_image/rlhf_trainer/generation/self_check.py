"""Before any training: does vLLM keep each parameter where `places` says? A version that does not is refused.

While the engine starts, vLLM's own loader is given probes, whose every element tells its row and column, for one
decoder layer and for what stands outside of the layers. Nothing is packed yet, and no forward pass is needed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.generation.places import Place, places_of

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@contextmanager
def layout_checked() -> Iterator[None]:
    """While this block runs, an engine that starts without weights (`load_format="dummy"`) is checked first."""
    original = DummyModelLoader.load_weights

    def checked(loader: DummyModelLoader, model: nn.Module, model_config: Any) -> None:
        check(model)
        original(loader, model, model_config)

    DummyModelLoader.load_weights = checked
    try:
        yield
    finally:
        DummyModelLoader.load_weights = original


@torch.no_grad()
def check(model: Any) -> None:
    """Overwrites the weights that it looks at. EnvironmentProblem names the parameter that lies elsewhere."""
    every = places_of(model)
    _require_no_gaps(every)
    places = _looked_at(every)
    for place in places.values():
        getattr(place.module, place.attribute).data.fill_(torch.nan)
    dtypes = {name: place.section().dtype for name, place in places.items()}
    try:
        model.load_weights((name, probe(name, places[name].shape).to(dtypes[name])) for name in places)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise EnvironmentProblem(
            f"vLLM {vllm.__version__} does not load parameters of these names and shapes: {reason}"
        ) from error
    for name, place in places.items():
        _compare(name, place, probe(name, place.shape))


def probe(name: str, shape: tuple[int, ...]) -> Tensor:
    """A byte for each element, made of its row's and its column's: uint8, exact in every dtype of a weight."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    axes = [torch.randint(256, (size,), dtype=torch.uint8, generator=generator, device="cpu") for size in shape]
    return axes[0] if len(axes) == 1 else axes[0][:, None] ^ axes[1][None, :]


def _looked_at(places: dict[str, Place]) -> dict[str, Place]:
    """Those of this rank's first decoder layer, and those outside of the layers."""
    layers = {name: found.group(1) for name in places if (found := _LAYER.search(name))}
    first = min(layers.values(), key=int, default="")
    return {name: place for name, place in places.items() if layers.get(name, first) == first}


def _require_no_gaps(places: dict[str, Place]) -> None:
    """Every row of vLLM's tensors is one of ours; a vocabulary may end with padding."""
    rows: dict[tuple[nn.Module, str], int] = {}
    for place in places.values():
        key = place.module, place.attribute
        rows[key] = rows.get(key, 0) + place.box.shape[0]
    for name, place in places.items():
        there = len(getattr(place.module, place.attribute))
        known = rows[place.module, place.attribute]
        if known > there or (known < there and not isinstance(place.module, VocabParallelEmbedding)):
            raise EnvironmentProblem(
                f"vLLM {vllm.__version__} keeps {there} rows where {name} lies, and this trainer knows {known} of them"
            )


def _compare(name: str, place: Place, expected: Tensor) -> None:
    section, box = place.section(), place.box
    whole = tuple(slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))
    if section.shape != box.shape or not torch.equal(section.cpu(), expected[whole].to(section.dtype)):
        raise EnvironmentProblem(
            f"vLLM {vllm.__version__} keeps {name} elsewhere than this trainer writes it, "
            "so its weights cannot be updated"
        )
