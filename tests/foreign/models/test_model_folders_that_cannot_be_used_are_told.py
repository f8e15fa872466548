"""`validate --deep` names job, field and file of each model folder with which a run would end, or learn nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import BloomConfig, FalconConfig, GptOssConfig, MambaConfig, OPTConfig, PreTrainedConfig
from typer.testing import CliRunner

from rlhf_api.exit_codes import ExitCode
from rlhf_trainer.commands.cli import app
from tests.foreign.models import folders
from tests.trainer.tiny import save_tiny

SFT = """\
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {name: sft}
spec:
  algorithm: {name: SFT}
  models: {actor: {uri: "file://model"}}
  data:
    train: {uri: file://rows.jsonl, responseKey: response}
    maxPromptTokens: 400
    maxResponseTokens: 100
  training: {totalSteps: 1, batchSize: 4}
  resources: {slotsPerNode: 1, device: CPU}
"""
GRPO = """\
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {name: grpo}
spec:
  algorithm: {name: GRPO}
  models:
    actor: {uri: "file://model"}
    reward: {verifier: {name: Length, maximum: 30}}
  data:
    train: {uri: file://rows.jsonl}
    maxPromptTokens: 500
    maxResponseTokens: 32
  rollout: {samplesPerPrompt: 2}
  training: {totalSteps: 1, promptBatchSize: 4}
  resources: {slotsPerNode: 1, device: CPU}
"""
Check = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(save_tiny(tmp_path / "model", seed=1))


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Manifest and rows -> what `rlhf validate --deep` says; it looks at 64 rows, if it need not look at all."""

    def validate(manifest: str = SFT, rows: int = 100, last: str = "What is it?") -> Any:
        (tmp_path / "job.yaml").write_text(manifest)
        lines = [json.dumps({"prompt": "How do I do it?", "response": "So."})] * rows
        lines.append(json.dumps({"prompt": last, "response": "So."}))
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        command = ["validate", "--deep", str(tmp_path / "job.yaml"), f"--output={tmp_path}/run"]
        return CliRunner().invoke(app, command)

    return validate


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "shards of an index": (
        folders.lose_shards,
        f"{{model}}/{folders.INDEX}: names files that are not in the folder: {', '.join(folders.SHARDS)}",
    ),
    "pickled shards of an index": (
        folders.lose_pickled_shards,
        "{model}/pytorch_model.bin.index.json: names files that are not in the folder: pytorch_model-00001-of-",
    ),
    "an index of nothing": (folders.empty_index, f"{{model}}/{folders.INDEX}: names no weights"),
    "weights of another form": (
        folders.rename_weights("model-Q4.gguf"),
        "{model}/model-Q4.gguf: is no file of weights",
    ),
    "a download that stopped": (
        folders.rename_weights("model.safetensors.incomplete"),
        "{model}/model.safetensors.incomplete: is no file of weights that is read; expected *.safetensors",
    ),
    "a config that contradicts itself": (
        lambda folder: folders.change_config(folder, layer_types=["full_attention"], model_type="qwen3"),
        "{model}: cannot be read as a model folder: ",
    ),
    "no tokenizer": (folders.lose_tokenizer, "{model}: the folder has no tokenizer (tokenizer.json)"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_refused_with_job_field_and_file(name: str, model: Path, check: Check) -> None:
    change, sentence = FOLDERS[name]
    change(model)
    done = check()
    assert done.exit_code == ExitCode.DATA, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: sft: spec.models.actor: {sentence.replace('{model}', str(model))}")


def test_random_weights_are_told(model: Path, check: Check) -> None:
    (model / "model.safetensors").unlink()
    done = check()
    assert (done.exit_code, done.stdout) == (0, "ok\n")
    told = f"sft: spec.models.actor: {model} has no weights; training begins with random ones\n"
    assert done.stderr == told


def test_tensors_that_are_not_read_are_named(model: Path, check: Check) -> None:
    folders.change_weights(model, lambda weights: {**weights, "mtp.0.weight": weights["model.norm.weight"].clone()})
    done = check()
    assert (done.exit_code, done.stdout) == (0, "ok\n")
    assert f"sft: spec.models.actor: {model}: 1 tensors are not read, and not saved: mtp.0.weight\n" in done.stderr


def test_a_token_beyond_the_vocabulary_is_told(model: Path, check: Check) -> None:
    """The row with the token comes after the first rows, which are all that the check reads of other data sets."""
    number = folders.add_token(model, "<tool>")
    assert check().exit_code == 0, "the tokenizer may have more tokens than the data need"
    done = check(last="use <tool>")
    assert done.exit_code == ExitCode.DATA
    (line,) = done.stderr.splitlines()
    told = f"needs the token '<tool>' ({number}), but the vocabulary of {model} ends at {number - 1}; "
    assert line.startswith(f"error: sft: spec.data.train: {told}")


def test_a_row_beyond_the_context_is_told(model: Path, check: Check) -> None:
    folders.change_config(model, max_position_embeddings=64)
    assert check().exit_code == 0
    done = check(last="word " * 60)
    assert done.exit_code == ExitCode.SPEC
    assert done.stderr.startswith("error: sft: spec.data.train: the length of its longest row is ")
    assert f"the model {model} reads 64 tokens at most" in done.stderr


def test_a_response_beyond_the_context_is_told(model: Path, check: Check) -> None:
    done = check(GRPO)
    assert done.exit_code == ExitCode.SPEC
    told = f"maxPromptTokens + maxResponseTokens is 532; the model {model} reads 512 tokens at most"
    assert f"error: grpo: spec.data: {told}" in done.stderr.splitlines()


SIZES = {"vocab_size": 512, "hidden_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, tuple[PreTrainedConfig, str]] = {
    "bloom": (BloomConfig(**SIZES, n_layer=2, n_head=2), ""),
    "falcon": (FalconConfig(**SIZES, **LAYERS), ""),
    "mamba": (MambaConfig(**SIZES, num_hidden_layers=2), ""),
    "gpt-oss": (
        GptOssConfig(**SIZES, **LAYERS, intermediate_size=64, num_local_experts=2, head_dim=32, num_key_value_heads=1),
        "",
    ),
    "opt": (
        OPTConfig(**SIZES, **LAYERS, ffn_dim=64, word_embed_proj_dim=64, max_position_embeddings=512),
        "has no list of layers in its base model",
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_refused_before_training(name: str, tmp_path: Path, check: Check) -> None:
    config, sentence = FAMILIES[name]
    folder = save_tiny(tmp_path / "model", seed=1, config=config)
    done = check()
    assert done.exit_code in (ExitCode.SPEC, ExitCode.DATA), done.output
    assert done.stderr.startswith(f"error: sft: spec.models.actor: {folder}: "), done.stderr
    assert sentence in done.stderr
