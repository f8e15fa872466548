"""Loads tokenizer, config and weights of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from rlhf_trainer.errors import ConfigError, DataError
from rlhf_trainer.training.models import LanguageModel, Scorer

WEIGHT_FILES = "*.safetensors"
PICKLED_WEIGHTS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
"""Files that can run code when they are loaded, so they are never loaded."""


def load_tokenizer(folder: str, *, trust_remote_code: bool, revision: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; DataError without an end-of-text token."""
    tokenizer: PreTrainedTokenizerBase = _loaded(
        AutoTokenizer, folder, trust_remote_code=trust_remote_code, revision=revision
    )
    if tokenizer.eos_token_id is None:
        raise DataError(f"{folder}: the tokenizer has no end-of-text token (eos_token)")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(folder: str, *, trust_remote_code: bool, revision: str | None) -> PreTrainedConfig:
    """config.json of a model folder."""
    config: PreTrainedConfig = _loaded(AutoConfig, folder, trust_remote_code=trust_remote_code, revision=revision)
    return config


def has_weights(folder: str) -> bool:
    """Whether a local model folder holds weights; a name on the hub counts as having them.

    DataError when it holds pickled ones only.
    """
    path = Path(folder)
    if not path.is_dir() or any(path.glob(WEIGHT_FILES)):
        return True
    if pickled := [file for pattern in PICKLED_WEIGHTS for file in path.glob(pattern)]:
        raise DataError(f"{pickled[0]}: pickled weights are never opened, for they can run code; save as safetensors")
    return False


def load_language_model(
    folder: str, *, seed: int, trust_remote_code: bool, revision: str | None, may_initialise: bool = False
) -> LanguageModel:
    """A causal language model with float32 weights.

    A folder without weights is initialised from `seed` where the caller allows it, and is a DataError elsewhere.
    """
    torch.manual_seed(seed)
    if has_weights(folder):
        model = _loaded(
            AutoModelForCausalLM,
            folder,
            trust_remote_code=trust_remote_code,
            revision=revision,
            dtype=torch.float32,
            use_safetensors=True,
        )
    elif may_initialise:
        config = load_config(folder, trust_remote_code=trust_remote_code, revision=revision)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    else:
        raise DataError(f"{folder}: the folder has no weights (*.safetensors)")
    return LanguageModel(model)


def load_scorer(
    folder: str, *, seed: int, trust_remote_code: bool, revision: str | None, path: str, may_add_head: bool = True
) -> Scorer:
    """A scorer with float32 weights, from a reward model or, with a new head drawn from `seed`, a language model.

    Raises ConfigError, naming `path` in the manifest, for a model with more than one label, and for a language model
    where no head may be added.
    """
    if not has_weights(folder):
        raise DataError(f"{folder}: the folder has no weights (*.safetensors)")
    config = load_config(folder, trust_remote_code=trust_remote_code, revision=revision)
    is_classifier = any("SequenceClassification" in name for name in config.architectures or [])
    if is_classifier and config.num_labels != 1:
        raise ConfigError(f"{path}: {folder} has {config.num_labels} labels; a reward model has 1")
    if not is_classifier and not may_add_head:
        raise ConfigError(
            f"{path}: {folder} is a language model without a trained score head; train a RewardModel first"
        )
    torch.manual_seed(seed)
    model = _loaded(
        AutoModelForSequenceClassification,
        folder,
        trust_remote_code=trust_remote_code,
        revision=revision,
        num_labels=1,
        dtype=torch.float32,
        use_safetensors=True,
    )
    if not hasattr(model, "score"):
        raise ConfigError(
            f"{path}: {type(model).__name__} has no `score` head, so it cannot be a reward model or critic"
        )
    return Scorer(model)


def _loaded(factory: Any, folder: str, **options: Any) -> Any:
    """`from_pretrained`; its errors become DataErrors of one sentence."""
    try:
        return factory.from_pretrained(folder, **options)
    except (OSError, ValueError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            raise DataError(f"{folder}: brings Python code of its own, which runs only with trustRemoteCode") from error
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{folder}: cannot be read as a model folder: {reason}") from error
