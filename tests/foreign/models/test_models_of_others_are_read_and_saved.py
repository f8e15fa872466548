"""Reward models, code and generation configs of other projects are read as they are, and saved again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhf_trainer.errors import ConfigError, DataError
from rlhf_trainer.generation.families import uses_modules, why_not_generated
from rlhf_trainer.stored_tensors import read_into
from rlhf_trainer.tensor_slice import TensorSlice
from rlhf_trainer.training.loading import (
    load_config,
    load_language_model,
    load_scorer,
    load_tokenizer,
    unread_tensors,
)
from rlhf_trainer.training.models import Scorer, inner
from rlhf_trainer.training.saving import save_config_and_tokenizer, try_saving
from rlhf_trainer.training.sharding import shard
from tests.foreign.models import folders
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import save_tiny

OPTIONS: dict[str, Any] = {"trust_remote_code": False, "revision": None}


def scorer(folder: Path, *, may_add_head: bool = False) -> Scorer:
    return load_scorer(str(folder), seed=0, path="here", may_add_head=may_add_head, **OPTIONS)


def renamed(name: str) -> Callable[[Path], None]:
    """Return a change of a folder in which the head has another name."""

    def rename(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name if own == "score.weight" else own: tensor for own, tensor in weights.items()}

    return lambda folder: folders.change_weights(folder, rename)


def of_class(architecture: str | None) -> Callable[[Path], None]:
    """Return a change of a folder to a config.json that names this class, and no number of labels."""
    unset = dict.fromkeys(("id2label", "label2id", "num_labels"))
    named = {"architectures": [architecture]} if architecture else {}
    return lambda folder: folders.change_config(folder, **unset, **named)


REWARD_MODELS: dict[str, tuple[Callable[[Path], None], ...]] = {
    "no number of labels": (of_class(None),),
    "OpenRLHF": (of_class("LLMForSequenceRegression"),),
    "OpenRLHF with value_head": (of_class("LLMForSequenceRegression"), renamed("value_head.weight")),
    "the class of a language model": (of_class("LlamaForCausalLM"),),
    "verl's critic": (of_class("LlamaForTokenClassification"),),
}


@pytest.mark.parametrize("may_add_head", [False, True])
@pytest.mark.parametrize("name", REWARD_MODELS)
def test_a_trained_head_is_found_by_its_tensor(name: str, may_add_head: bool, tmp_path: Path) -> None:
    folder = Path(save_tiny(tmp_path / "model", seed=1, labels=1))
    trained = load_file(folder / "model.safetensors")["score.weight"]
    for change in REWARD_MODELS[name]:
        change(folder)
    model = scorer(folder, may_add_head=may_add_head)
    assert model.weights
    read = torch.empty(1, 64)
    read_into(read, TensorSlice.whole((1, 64)), model.weights["score.weight"])
    assert torch.equal(read, trained)
    assert inner(model).config.num_labels == 1
    assert not unread_tensors(inner(model), model.weights)


def test_a_head_of_several_tensors_is_refused(tmp_path: Path) -> None:
    folder = Path(save_tiny(tmp_path / "model", seed=1, labels=1))
    renamed("v_head.summary.weight")(folder)
    folders.change_weights(folder, lambda weights: {**weights, "v_head.summary.bias": torch.ones(1)})
    told = r"its score head is v_head.summary.bias \[1\], v_head.summary.weight \[1, 64\]; only one matrix"
    with pytest.raises(ConfigError, match=told):
        scorer(folder)


def test_a_head_that_was_lost_is_told(tmp_path: Path) -> None:
    folder = Path(save_tiny(tmp_path / "model", seed=1, labels=1))
    folders.change_weights(folder, lambda weights: {k: v for k, v in weights.items() if k != "score.weight"})
    with pytest.raises(DataError, match=r"the weights lack score\.weight, which the class in config\.json has"):
        scorer(folder, may_add_head=True)


def test_a_generation_config_is_saved_as_it_is(tmp_path: Path) -> None:
    folder = Path(save_tiny(tmp_path / "model", seed=1))
    settings = folders.set_sampling(folder)
    model, tokenizer = load_language_model(str(folder), seed=0, **OPTIONS), load_tokenizer(str(folder), **OPTIONS)
    save_config_and_tokenizer(inner(model), tokenizer, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved.items() >= {name: value for name, value in settings.items() if value}.items()
    try_saving(model, tokenizer, trust_remote_code=False)


def test_a_config_that_cannot_be_saved_is_told(tmp_path: Path) -> None:
    folder = Path(save_tiny(tmp_path / "model", seed=1))
    model, tokenizer = load_language_model(str(folder), seed=0, **OPTIONS), load_tokenizer(str(folder), **OPTIONS)
    inner(model).config.temperature = 0.5
    with pytest.raises(DataError, match=f"^{folder}: cannot be saved and loaded again: Some generation parameters"):
        try_saving(model, tokenizer, trust_remote_code=False)


def test_a_models_own_code_is_loaded_twice_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.keep_modules(monkeypatch, tmp_path / "modules")
    folder = Path(save_tiny(tmp_path / "model", seed=1))
    folders.add_code(folder)
    trusting = {**OPTIONS, "trust_remote_code": True}
    models = [load_language_model(str(folder), seed=0, **trusting) for _ in range(2)]
    assert [type(inner(model)).__name__ for model in models] == ["MineForCausalLM"] * 2
    tokenizer, saved = load_tokenizer(str(folder), **trusting), tmp_path / "saved"
    save_config_and_tokenizer(inner(models[1]), tokenizer, saved)
    assert {"configuration_mine.py", "modeling_mine.py"} <= {file.name for file in saved.iterdir()}
    try_saving(models[0], tokenizer, trust_remote_code=True)


def test_a_models_own_code_generates_only_if_it_may_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's backend runs it; a server elsewhere has no such code."""
    folders.keep_modules(monkeypatch, tmp_path / "modules")
    folder = Path(save_tiny(tmp_path / "model", seed=1))
    folders.add_code(folder)
    config = load_config(str(folder), trust_remote_code=True, revision=None)
    assert why_not_generated(config, on_cpu=False, trust_remote_code=True) == ""
    assert why_not_generated(config, on_cpu=False).startswith("is a mine, whose layout in vLLM this trainer does not")
    told = why_not_generated(config, on_cpu=False, trust_remote_code=True, elsewhere=True)
    assert told == "generates only in the job's own engines, and spec.rollout.endpoints names servers"
    assert uses_modules(config, trust_remote_code=True)


def test_an_own_class_of_a_known_family_is_not_vllms(tmp_path: Path) -> None:
    """The folder of the model names a Llama's config, so vLLM could take its own Llama."""
    config = load_config(save_tiny(tmp_path, seed=1), trust_remote_code=False, revision=None)
    config.auto_map = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    assert [uses_modules(config, trust_remote_code=trusted) for trusted in (True, False)] == [True, False]


def load_shards(folder: str) -> str:
    model = load_language_model(folder, seed=0, **OPTIONS)
    try:
        shard(model, compute_dtype=torch.float32, recompute_activations=False)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_told(value: float, tmp_path: Path) -> None:
    folder = Path(save_tiny(tmp_path / "model", seed=1))

    def spoil(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        weights["model.layers.0.mlp.up_proj.weight"][0, 0] = value
        return weights

    folders.change_weights(folder, spoil)
    (told,) = run_kept_ranks(1, load_shards, str(folder))
    assert told == "model.layers.0.mlp.up_proj.weight cannot be read: a value in the file is not finite"
