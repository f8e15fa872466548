"""Model folders of any size whose weights, all 0, take no disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

TOKENIZER = Path(__file__).parents[2] / "examples" / "rlhf_examples" / "helpful" / "model"
FILE_BYTES = 5 * 10**9
"""The most of a file of weights, as on the hub; a file that is larger than the memory cannot be mapped."""


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
    files: list[dict[str, Tensor]] = [{}]
    stored = model.state_dict().keys()
    for name, weight in (*model.named_parameters(), *(each for each in model.named_buffers() if each[0] in stored)):
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
