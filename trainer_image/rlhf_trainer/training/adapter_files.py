"""Adapters as PEFT keeps them: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from rlhf_trainer.errors import DataError
from rlhf_trainer.stored_tensors import LocalFile, Piece, StoredTensor, TensorSource, write_tensors
from rlhf_trainer.training.loading import stored_model
from rlhf_trainer.training.lora import HEAD, A, B, merged
from rlhf_trainer.training.models import Adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of PEFT's names, before those of the model."""
PLAIN: Mapping[str, object] = {
    "peft_type": "LORA",
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
}
"""Fields of adapter_config.json that have one value here; of an adapter that is read, dropout may be another."""


def peft_name(name: str) -> str:
    """PEFT's name of a parameter that is trained."""
    for own, theirs in ((A, "lora_A.weight"), (B, "lora_B.weight")):
        if name.endswith(f".{own}"):
            return f"{PREFIX}{name.removesuffix(own)}{theirs}"
    return f"{PREFIX}{name}"


def write_adapter_config(adapter: Adapter, folder: Path) -> None:
    """Write adapter_config.json."""
    document = {
        **PLAIN,
        "task_type": "SEQ_CLS" if adapter.scores else "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "revision": adapter.revision,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.targets),
        "modules_to_save": [HEAD] if adapter.scores else None,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(document, indent=2) + "\n")


def adapter_of(text: str, *, trust_remote_code: bool) -> Adapter:
    """What `write_adapter_config` wrote."""
    found = json.loads(text)
    return Adapter(
        rank=found["r"],
        alpha=found["lora_alpha"],
        targets=tuple(found["target_modules"]),
        base=found["base_model_name_or_path"],
        revision=found["revision"],
        trust_remote_code=trust_remote_code,
        scores=found["task_type"] == "SEQ_CLS",
    )


def write_adapter(adapter: Adapter, trained: Mapping[str, TensorSource], folder: Path) -> None:
    """Write a PEFT directory; trained: what `TrainerState` or ranks keep, by its name in the model."""
    write_adapter_config(adapter, folder)
    named = {peft_name(name): each for name, each in trained.items()}
    write_tensors(folder / WEIGHTS, named, torch.float32, {"format": "pt"})


def merged_weights(adapter: Adapter, trained: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The tensors of the model that adapter and weights make together, which are read from where they were stored.

    So it does not matter in which type a run has held them. DataError if they are not there.
    """
    if Path(adapter.base).is_absolute() and not Path(adapter.base).is_dir():
        raise DataError(f"{adapter.base}: the model that the adapter adds to is not there any more")
    code, revision = adapter.trust_remote_code, adapter.revision
    weights = stored_model(adapter.base, scores=adapter.scores, trust_remote_code=code, revision=revision)
    return merged(weights, trained, adapter.scale)


def initial_weights(
    adapter: Adapter, folder: str, shapes: Mapping[str, tuple[int, ...]], *, path: str
) -> dict[str, StoredTensor]:
    """Where the parameters of an adapter are in a PEFT directory, a local one or one of the hub; shapes: by name.

    DataError, naming the field `path`, for an adapter of another rank, alpha or targets, or of another kind.
    """
    where = f"{path}: {folder}"
    config, weights = _found(folder, CONFIG, where), _found(folder, WEIGHTS, where)
    _require_alike(json.loads(Path(config).read_text()), adapter, where)
    file = LocalFile(partial(str, weights))
    there = set(file.names())
    for name, shape in shapes.items():
        if peft_name(name) not in there:
            raise DataError(f"{where}: the adapter lacks {peft_name(name)}")
        if (found := file.shape(peft_name(name))) != shape:
            raise DataError(f"{where}: {peft_name(name)} is {list(found)}, and {list(shape)} in the model")
    if more := sorted(there - set(map(peft_name, shapes))):
        raise DataError(f"{where}: the adapter has {more[0]}, which the model has not")
    return {name: StoredTensor([Piece(file, peft_name(name))]) for name in shapes}


def _found(folder: str, name: str, where: str) -> str:
    try:
        return str(cached_file(folder, name))
    except OSError as error:
        raise DataError(f"{where}: is no PEFT directory: it has no {name}") from error


def _require_alike(found: Mapping[str, Any], adapter: Adapter, where: str) -> None:
    plain = {name: each for name, each in PLAIN.items() if name in found and name != "lora_dropout"}
    wanted = {"r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": sorted(adapter.targets), **plain}
    targets = found.get("target_modules")
    there = {**found, "target_modules": sorted(targets) if isinstance(targets, list) else targets}
    for name, value in wanted.items():
        if there.get(name) != value:
            raise DataError(f"{where}: {name} of the adapter is {there.get(name)}, expected {value}")
