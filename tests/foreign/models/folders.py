"""Model folders as people have them, made small: each function changes a folder that `save_tiny` has written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; None removes one."""
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """Write the weights again as `change` returns them."""
    file = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(dict(change(weights)), file, {"format": "pt"})


def lose_shards(folder: Path) -> None:
    """Leave the index of weights without its files, as a download that stopped."""
    (folder / "model.safetensors").unlink()
    names = {"model.embed_tokens.weight": SHARDS[0], "model.norm.weight": SHARDS[1]}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def lose_pickled_shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    text = json.dumps({"weight_map": {"model.norm.weight": "pytorch_model-00001-of-00001.bin"}})
    (folder / "pytorch_model.bin.index.json").write_text(text)


def empty_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text("{}")


def rename_weights(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def lose_tokenizer(folder: Path) -> None:
    for file in [*folder.glob("token*"), *folder.glob("*.jinja"), *folder.glob("special*"), *folder.glob("added*")]:
        file.unlink()


def add_token(folder: Path, token: str) -> int:
    """Add a special token to the tokenizer alone; return its id, which the embedding lacks."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [token]})
    tokenizer.save_pretrained(folder)
    return int(tokenizer.convert_tokens_to_ids(token))


def set_sampling(folder: Path) -> dict[str, Any]:
    """Write the generation config of Vicuna and Llama-2-chat, which `save_pretrained` refuses; return its settings."""
    settings = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": 2}))
    return settings


MODELING = """\
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from .configuration_mine import MineConfig

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
    base_model_prefix = "{prefix}"
    _tied_weights_keys = {{"lm_head.weight": "{prefix}.embed_tokens.weight"}}

    def __init__(self, config):
        LlamaPreTrainedModel.__init__(self, config)
        self._modules["{prefix}"] = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def model(self):
        return self._modules["{prefix}"]
"""
"""Code of a model that names its decoder as it likes."""


def add_code(folder: Path, prefix: str = "model") -> None:
    """Give the model folder its own model class, in two files; one file imports the other.

    prefix: name of the decoder in the model with a head.
    """
    (folder / "configuration_mine.py").write_text(
        "from transformers import LlamaConfig\nclass MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
    )
    (folder / "modeling_mine.py").write_text(MODELING.format(prefix=prefix))
    places = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    change_config(folder, model_type="mine", architectures=["MineForCausalLM"], auto_map=places)
    change_weights(folder, lambda weights: {name.replace("model.", f"{prefix}.", 1): weights[name] for name in weights})


def keep_modules(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Have transformers copy the code of models to this folder, and forget what it has imported from another."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(cache))
    cache.mkdir(exist_ok=True)
    monkeypatch.syspath_prepend(cache)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
