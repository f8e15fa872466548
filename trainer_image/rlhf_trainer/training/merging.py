"""Merging of language models that lie in files, a tensor at a time: the methods of mergekit 0.1.5, and alignment."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from rlhf_api.spec.merging import FROM_BASE, Merging
from rlhf_trainer.errors import ConfigError, DataError, TrainerError
from rlhf_trainer.stored_tensors import HeldTensor, LocalFile, read_into, write_tensors, written_type
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.tensor_slice import TensorSlice
from rlhf_trainer.training.adapters import CONFIG as ADAPTER_CONFIG
from rlhf_trainer.training.alignment import Cut, align, cut_of
from rlhf_trainer.training.loading import as_stored, load_language_model, load_tokenizer, try_config, unread_tensors
from rlhf_trainer.training.models import inner, kept_buffers
from rlhf_trainer.training.saving import disk_errors, save_config_and_tokenizer

STRAIGHT, TINY = 0.9995, 1e-7
"""Cosine of two tensors above which SLERP interpolates linearly; sum below which DARE does not rescale."""
COMPUTED_BY = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
    *("hidden_act", "activation_function", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    *("rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "num_experts_per_tok"),
)
"""Settings of config.json that change what the same tensors compute."""
PLAIN: Any = {"trust_remote_code": False, "revision": None}
IN_LAYER = re.compile(r"\.(\d+)\.")


def slerp(one: Tensor, other: Tensor, share: float) -> Tensor:
    """Return the point on the arc between two tensors at a share of the way from the first."""
    norms = [max(float(each.norm()), TINY) for each in (one, other)]
    angle = (one / norms[0] * (other / norms[1])).sum().clamp(-1, 1).acos()
    if angle.cos().abs() > STRAIGHT:
        return torch.lerp(one, other, share)
    return (one * ((1 - share) * angle).sin() + other * (share * angle).sin()) / angle.sin()


def kept(change: Tensor, density: float, draw: torch.Generator | None = None) -> Tensor:
    """Zero all but a share `density` of a change: keep the largest or, by `draw`, random ones scaled to its L1 norm."""
    if draw is None:
        dropped, sizes = change.numel() - max(1, int(density * change.numel())), change.abs()
        return change * (sizes >= sizes.flatten().kthvalue(dropped + 1).values)
    part = change * torch.full_like(change, density).bernoulli(generator=draw) if density < 1 else change
    before, after = change.abs().sum(), part.abs().sum()
    return part * (before / after if min(before, after) >= TINY else 1.0)


def weighted_sum(weights: Tensor, tensors: Tensor) -> Tensor:
    """Return the sum of tensors [models, ...] times their weights [models]."""
    return (tensors * weights.view(-1, *[1] * (tensors.ndim - 1))).sum(0)


def elected(changes: Tensor, weights: Tensor) -> Tensor:
    """Return, by element, the weighted mean of the changes [models, ...] that have the sign of the weighted sum."""
    scaled = changes * weights.view(-1, *[1] * (changes.ndim - 1))
    is_counted = scaled.sign() == torch.where(scaled.sum(0) >= 0, 1.0, -1.0)
    total = weighted_sum(weights, is_counted.float())
    return (scaled * is_counted).sum(0) / torch.where(total != 0, total, 1.0)


class Merger:
    """Merge of language models in files, by parts: part 0 holds the tensors outside the layers, part n layer n - 1.

    It holds one tensor of all models at a time in float32, and the merged part; for OT also a matrix [units, units].
    """

    def __init__(self, options: Merging, folders: Sequence[str], *, seed: int) -> None:
        """Open the models; folders: local folders or hub names of `options.addresses`. seed: for DARE's draws."""
        self._options, self._seed = options, seed
        opened = [load_language_model(folder, seed=0, **PLAIN) for folder in folders]
        self._model, self._weights = inner(opened[0]), [each.weights or {} for each in opened]
        names = [*dict(self._model.named_parameters()), *kept_buffers(self._model)]
        parts = {name: 1 + int(found[1]) if (found := IN_LAYER.search(name)) else 0 for name in names}
        self._parts = [[name for name in names if parts[name] == part] for part in range(1 + max(parts.values()))]
        end = f"-of-{len(self._parts):05d}.safetensors"
        self._files = [f"model-{part:05d}{end}" for part, _ in enumerate(self._parts, start=1)]
        self._cuts = cuts_of(self._model) if options.method == "OT" else {}

    def write(self, part: int, place: Path) -> bool:
        """Merge a part into a file in `place`, renamed once complete; return whether the part is the last one."""
        cuts = {name: self._cuts[name] for name in self._parts[part] if name in self._cuts}
        others = range(1, len(self._weights)) if cuts else ()
        orders = [align(cuts, partial(self._read, 0), partial(self._read, model)) for model in others]
        for order in (order for found in orders for order in found.values()):
            recorder.mean("merge/moved", (order != torch.arange(len(order))).sum(), len(order))
        config, merged, path = self._model.config, dict[str, HeldTensor](), place / self._files[part]
        for name in self._parts[part]:
            tensors = [self._read(model, name) for model in range(len(self._weights))]
            for model, units in enumerate(orders if name in cuts else (), start=1):
                tensors[model] = cuts[name].ordered(tensors[model], units)
            values = self._merged(name, tensors).to(written_type(name, config.dtype))
            if not values.isfinite().all():
                raise DataError(f"spec.algorithm: a merged value of {name} is not finite in {values.dtype}")
            merged[name] = HeldTensor(values)
        with disk_errors("the model", place):
            place.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".part")
            write_tensors(unfinished, as_stored(config.model_type, merged), config.dtype, {"format": "pt"})
            unfinished.rename(path)
        return part + 1 == len(self._parts)

    def finish(self, place: Path, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write missing parts, the index, config and tokenizer to `place`, and move `place` to `folder`."""
        for part in (part for part, file in enumerate(self._files) if not (place / file).is_file()):
            self.write(part, place)
        with disk_errors("the model", folder):
            names = {name: file for file in self._files for name in LocalFile(partial(str, place / file)).names()}
            (place / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": names}, indent=2))
            save_config_and_tokenizer(self._model, tokenizer, place)
            shutil.rmtree(folder, ignore_errors=True)
            place.rename(folder)

    def _read(self, model: int, name: str) -> Tensor:
        source = self._weights[model][name]
        values = torch.empty(source.shape)
        read_into(values, TensorSlice.whole(source.shape), source)
        if not values.isfinite().all():
            raise DataError(f"spec.{[*self._options.addresses()][model]}: a value of {name} is not finite")
        return values

    def _merged(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Merge one tensor of all models, in float32; where the method needs a base model, the base's is the last."""
        options = self._options
        weights = torch.tensor([each.weight for each in options.models], dtype=torch.float64)
        weights = (weights if options.method in FROM_BASE else weights / weights.sum()).float()
        if options.method == "SLERP":
            return slerp(tensors[0], tensors[1], float(weights[1]))
        if options.method not in FROM_BASE:
            return weighted_sum(weights, torch.stack([*tensors]))
        *models, base = tensors
        by_size = options.method == "TIES"
        draw = None if by_size else torch.Generator().manual_seed(crc32(name.encode(), self._seed))
        changes = torch.stack([kept(each - base, options.density, draw) for each in models])
        return base + (elected(changes, weights) if by_size else weighted_sum(weights, changes))


def cuts_of(model: PreTrainedModel) -> dict[str, Cut]:
    """Return how OT cuts the parameters of the layers, by name; ConfigError for a layer that it does not know."""
    named = ((name, each) for name, each in model.named_parameters() if IN_LAYER.search(name))
    return {name: cut for name, each in named if (cut := cut_of(model, name, each))}


def require_alike(folders: Mapping[str, tuple[str, bool]], *, by_ot: bool) -> None:
    """Raise a TrainerError, naming the field, for a model that cannot be merged with the first one.

    folders: by field, (folder, whether another job will make the model to merge from the one in the folder).
    """
    known: dict[str, object] = {}
    for path, (folder, is_made) in folders.items():
        try:
            own = _traits(folder, is_made=is_made, by_ot=by_ot)
        except TrainerError as error:
            raise type(error)(f"{path}: {error}") from error
        known = known or own
        if name := next((each for each in {**known, **own} if known.get(each) != own.get(each)), ""):
            both = f": {own.get(name)}, not {known.get(name)}" * (name != "vocabulary")
            raise ConfigError(f"{path}: {folder} has another {name} than the first model{both}")


def _traits(folder: str, *, is_made: bool, by_ot: bool) -> dict[str, object]:
    """Return the properties in which models to merge must be equal, by name."""
    if Path(folder, ADAPTER_CONFIG).is_file():
        raise ConfigError(f"{folder} holds an adapter; `rlhf export CHECKPOINT DIR --merge` makes a model of it")
    opened = try_config(folder, scores=False, **PLAIN) if is_made else load_language_model(folder, seed=0, **PLAIN)
    model = inner(opened)
    if unread := unread_tensors(model, opened.weights or ()):
        raise DataError(f"{folder}: {len(unread)} tensors are of no language model: {', '.join(unread[:4])}")
    if by_ot:
        cuts_of(model)
    traits = {"family": model.config.model_type, "vocabulary": load_tokenizer(folder, **PLAIN).get_vocab()}
    traits |= {f"shape of {name}": tuple(each.shape) for name, each in model.named_parameters()}
    return traits | {each: getattr(model.config.get_text_config(), each, None) for each in COMPUTED_BY}
