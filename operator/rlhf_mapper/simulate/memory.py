"""Bytes of a GPU: states of the models that live there, and what a phase adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import Software
from rlhf_mapper.simulate.layouts import Layouts, Numbers
from rlhf_mapper.workload import Work

STATE_SHARE = 0.8
"""Of a GPU's memory, what states may fill: with 18 and 2 bytes a parameter it gives the published smallest clusters."""
USABLE_SHARE = 0.92
"""Of a GPU's memory, what states, activations and the KV cache may fill together."""
HOST_SHARE = 0.5
"""Of a GPU's part of the host memory, what states may fill that wait there; a prior: Ray and the programs need some."""


Part = Literal["weights", "gradients", "optimizer", "activations", "generator", "kv_cache"]

Kept = Literal["Everything", "LayerInputs", "Nothing"]


def states(model: Architecture, software: Software, *, trains: bool) -> dict[Part, float]:
    """Bytes of a model's states over all GPUs of a replica."""
    if not trains:
        return {"weights": model.parameters * software.frozen_bytes}
    return {
        "weights": model.parameters * software.weight_bytes,
        "gradients": model.parameters * software.gradient_bytes,
        "optimizer": model.parameters * software.optimizer_bytes,
    }


def parts_of_gpu(
    states: Mapping[Part, float], software: Software, *, replica: Numbers | float, gpus: Numbers
) -> dict[Part, Numbers]:
    """Bytes of a GPU: what data-parallel ranks share is cut over all GPUs of the pool, the rest over p t of them."""
    shared = {part for part in states if software.shards_weights or part == "optimizer"}
    return {part: size / (gpus if part in shared else replica + 0 * gpus) for part, size in states.items()}


def gathered(model: Architecture, software: Software, layouts: Layouts) -> Numbers:
    """Bytes of what FSDP gathers at a time: two layers, or the embedding and head."""
    if not software.shards_weights:
        return np.zeros_like(layouts.gpus)
    widest = max(2 * model.layer_parameters, model.vocabulary * model.hidden + model.head_parameters)
    return np.where(layouts.d > 1, widest * software.compute_bytes / layouts.t, 0.0)


def activations(model: Architecture, software: Software, layouts: Layouts, tokens: Numbers, *, kept: Kept) -> Numbers:
    """Bytes for micro-batches of so many tokens on the first stage (Korthikanti et al., arXiv 2205.05198).

    With flash attention a layer has s b h (10 + 24/t) bytes in two-byte numbers, its input 2 s b h. A backward pass
    needs them of all layers, or the inputs and one layer where layers are recomputed, for as many micro-batches as
    there are stages; a forward pass alone needs one layer.
    """
    layers = np.ceil(model.layers / layouts.p)
    one = tokens * model.hidden * (10 + 24 / layouts.t)
    inputs = 2 * tokens * model.hidden * layers
    held = {"Nothing": one, "LayerInputs": inputs * layouts.p + one, "Everything": one * layers * layouts.p}[kept]
    logits = tokens * (1 if model.scores else model.vocabulary) / layouts.t * 4 * 2  # and their gradient, in float32
    bytes_: Numbers = software.compute_bytes / 2 * held + logits
    return bytes_


def kept_of(work: Work, *, trains: bool) -> Kept:
    """What a pass keeps for a backward pass."""
    return "Nothing" if not trains else "LayerInputs" if work.recomputes else "Everything"
