"""Rotary embeddings whose factors transformers chooses by the longest text of each forward pass."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

FIXED = "default"
"""Type of RoPE for which transformers keeps the frequencies that a module has."""


def fix_rope(model: PreTrainedModel, tokens: int) -> None:
    """Give RoPE of the types longrope and dynamic the factors of a text of `tokens` tokens, whatever text is read.

    Otherwise a row would depend on its micro-batch. vLLM, too, chooses once, by its engine's longest text.
    """
    modules: list[Any] = [each for each in model.modules() if hasattr(each, "rope_type")]
    for module in modules:
        types = module.rope_type if isinstance(module.rope_type, Mapping) else {None: module.rope_type}
        for layer in [layer for layer, kind in types.items() if kind == "longrope" or "dynamic" in kind]:
            module(torch.zeros(1), torch.tensor([[tokens - 1]]), layer)  # transformers chooses the factors
            module.rope_type = {**module.rope_type, layer: FIXED} if layer else FIXED
