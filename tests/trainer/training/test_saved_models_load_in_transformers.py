"""What the trainer writes is an ordinary Hugging Face directory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import ConfigError, DataError
from rlhf_trainer.training.loading import load_language_model, load_scorer, load_tokenizer
from rlhf_trainer.training.saving import save_model
from rlhf_trainer.training.sharding import shard
from rlhf_trainer.training.trainer import ModelRunner
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.reading import all_tokens, log_probs
from tests.trainer.tiny import EXAMPLE_MODEL, divisible_config, save_tiny

TOKENS = torch.tensor([[5, 6, 7, 8, 9]])


def save_again(folder: str, output: str, is_scorer: bool, layout: ParallelSizes | None = None) -> None:
    load: dict[str, Any] = {"seed": 0, "trust_remote_code": False, "revision": None}
    model = load_scorer(folder, path="spec.models.reward", **load) if is_scorer else load_language_model(folder, **load)
    sharded = shard(model, layout, compute_dtype=torch.float32, recompute_activations=True)
    save_model(sharded, load_tokenizer(folder, trust_remote_code=False, revision=None), Path(output))


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_goes_through_two_shards_unchanged(tied: bool, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "before", seed=1, tied=tied)
    run_kept_ranks(2, save_again, folder, str(tmp_path / "after"), False)
    before = AutoModelForCausalLM.from_pretrained(folder)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    assert torch.equal(before(TOKENS).logits, after(TOKENS).logits)
    assert after.config.architectures == ["LlamaForCausalLM"]
    assert AutoTokenizer.from_pretrained(tmp_path / "after").encode("How do I") == AutoTokenizer.from_pretrained(
        EXAMPLE_MODEL
    ).encode("How do I")
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("kind", ["tied", "untied", "scorer"])
def test_a_model_goes_through_stages_and_shards_unchanged(kind: str, tmp_path: Path) -> None:
    config, labels = divisible_config(tied=kind == "tied"), 1 if kind == "scorer" else None
    folder = save_tiny(tmp_path / "before", seed=1, labels=labels, config=config)
    run_kept_ranks(
        4, save_again, folder, str(tmp_path / "after"), bool(labels), ParallelSizes(data=1, pipeline=2, tensor=2)
    )
    before, after = (load_file(str(path / "model.safetensors")) for path in (Path(folder), tmp_path / "after"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_reward_model_loads_as_a_sequence_classifier(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "before", seed=1, labels=1)
    run_kept_ranks(2, save_again, folder, str(tmp_path / "after"), True)
    before = AutoModelForSequenceClassification.from_pretrained(folder)
    after = AutoModelForSequenceClassification.from_pretrained(tmp_path / "after")
    assert torch.equal(before(TOKENS).logits, after(TOKENS).logits)
    assert after(TOKENS).logits.shape == (1, 1)


def save_after_a_bfloat16_forward(folder: str, output: str) -> None:
    model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    sharded = shard(model, compute_dtype=torch.bfloat16, recompute_activations=False)
    engine = ModelRunner(sharded, token_budget=100, role="actor", offload="None", attention="Auto")
    engine.infer({"tokens": TOKENS}, all_tokens, log_probs)
    save_model(sharded, load_tokenizer(folder, trust_remote_code=False, revision=None), Path(output))


@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16_leaves_the_saved_weights_in_float32(tied: bool, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "before", seed=1, tied=tied)
    run_kept_ranks(2, save_after_a_bfloat16_forward, folder, str(tmp_path / "after"))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_reward_model_with_two_labels_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "two", seed=1, labels=2)
    with pytest.raises(ConfigError, match=r"spec\.models\.reward: .*two has 2 labels; "):
        load_scorer(folder, seed=0, trust_remote_code=False, revision=None, path="spec.models.reward")


def test_a_frozen_reward_must_have_been_trained(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "lm", seed=1)
    with pytest.raises(ConfigError, match="without a trained score head"):
        load_scorer(
            folder, seed=0, trust_remote_code=False, revision=None, path="spec.models.reward", may_add_head=False
        )


def test_only_sft_starts_from_a_folder_without_weights() -> None:
    folder = str(EXAMPLE_MODEL)
    with pytest.raises(DataError, match="has no weights"):
        load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
