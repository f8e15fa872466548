"""vLLM writes with an actor's adapter what transformers writes with the merged model, and its log-probabilities too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.hybrid_engine.hybrid_engine import HybridEngine, engine_groups
from rlhf_trainer.training.loading import load_tokenizer
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.saving import save_model
from tests.trainer.generation.conftest import RunRanks
from tests.trainer.generation.engines import build, texts
from tests.trainer.generation.models import prompts, save_config
from tests.trainer.generation.test_engines_over_several_ranks_write_what_one_model_says import (
    differs_where_two_are_close,
)
from tests.trainer.tiny import save_tiny
from tests.trainer.training.test_an_adapter_is_trained_beside_frozen_weights import train, trainer_of

pytestmark = pytest.mark.slow


def write(folder: str, output: str, layout: ParallelSizes) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy texts before and after two updates; the merged model is saved."""
    trainer, engine = trainer_of(folder, layout), build(folder, engine_groups(layout))
    config, dtype = inner(trainer.model.module).config, trainer.model.compute_dtype
    hybrid = HybridEngine(trainer.model, engine, config=config, dtype=dtype, trust_remote_code=False)
    written = []
    for steps in (range(0), range(1, 3)):
        train(trainer, steps)
        hybrid.to_generation()
        engine.wake_cache()
        written.append(texts(engine, prompts(0), greedy=True))
        engine.sleep()
    tokenizer = load_tokenizer(folder, trust_remote_code=False, revision=None)
    save_model(trainer.model, tokenizer, Path(output) / "model")
    return written[0], written[1]


@pytest.mark.parametrize(
    "layout",
    [
        ParallelSizes(data=2, generation_tensor=1),
        ParallelSizes(data=1, tensor=2, generation_tensor=1),
        ParallelSizes(data=1, tensor=2, generation_tensor=2),
        ParallelSizes(data=1, pipeline=2, generation_pipeline=1, generation_tensor=1),
    ],
    ids=["1-1-2", "1-2-1 to 1-1", "1-2-1 to 1-2", "2-1-1 to 1-1"],
)
def test_greedy_tokens_are_those_of_the_merged_model(
    layout: ParallelSizes, tmp_path: Path, vllm_ranks: RunRanks
) -> None:
    config = AutoConfig.from_pretrained(save_config(tmp_path / "config", "llama"))
    config.vocab_size = 512  # as in the texts that it learns from
    folder = save_tiny(tmp_path / "base", seed=3, config=config)
    ranks: list[Any] = vllm_ranks(layout.world_size, write, folder, str(tmp_path), layout)
    models = [AutoModelForCausalLM.from_pretrained(each) for each in (folder, tmp_path / "model")]
    for rank in ranks:
        for model, written in zip(models, rank, strict=True):
            close = sum(map(differs_where_two_are_close, [model] * len(written), prompts(0), written))
            assert close <= 0.02 * len(written)
        assert sum(map(list.__ne__, *rank)) > 0.9 * len(rank[0])
    torch.testing.assert_close(models[0].lm_head.weight, models[1].lm_head.weight)
