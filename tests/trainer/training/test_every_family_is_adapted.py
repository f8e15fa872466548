"""An adapter of each family of docs/models.md computes what PEFT makes of it; GPT-2 has no linear layers."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.training.loading import load_tokenizer
from rlhf_trainer.training.saving import save_model
from tests.trainer.families import FAMILIES, TENSOR
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.reading import all_tokens, log_probs
from tests.trainer.tiny import save_tiny
from tests.trainer.training.test_an_adapter_is_trained_beside_frozen_weights import (
    TOKENS,
    log_probs_of,
    train,
    trainer_of,
)

pytestmark = pytest.mark.slow
ADAPTED = [name for name in FAMILIES if name not in ("GPT-2", "DeepSeek-V3")]
"""PEFT takes DeepSeek-V3's gate_proj, up_proj and down_proj for those of the experts."""


def adapted_log_probs(folder: str, output: str, layout: ParallelSizes) -> Tensor:
    trainer = trainer_of(folder, layout)
    train(trainer, range(1, 3))
    tokenizer = load_tokenizer(folder, trust_remote_code=False, revision=None)
    save_model(trainer.model, tokenizer, Path(output) / "model")
    return trainer.infer({"tokens": TOKENS}, all_tokens, log_probs)


@pytest.mark.parametrize("family", ADAPTED)
def test_peft_and_the_merged_model_compute_the_same(family: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "base", seed=3, config=FAMILIES[family])
    layout = ParallelSizes(data=1, tensor=2) if family in TENSOR else ParallelSizes(data=2)
    found = run_kept_ranks(2, adapted_log_probs, folder, str(tmp_path), layout)[0]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        before = log_probs_of(base)
        after = log_probs_of(PeftModel.from_pretrained(base, str(tmp_path / "adapter")))
        merged = log_probs_of(AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager"))
    assert (after - before).abs().max() > 0.05
    torch.testing.assert_close(found, after, rtol=0, atol=1e-4)
    torch.testing.assert_close(merged, after, rtol=0, atol=1e-4)


def test_gpt2_has_nothing_to_adapt(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "base", seed=3, config=FAMILIES["GPT-2"])
    with pytest.raises(AssertionError, match=r"lora: no layer of GPT2LMHeadModel has a linear matrix to adapt"):
        run_kept_ranks(1, adapted_log_probs, folder, str(tmp_path), ParallelSizes(data=1))
