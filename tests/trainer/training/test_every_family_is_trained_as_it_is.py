"""Each family of models is read, trained and saved as transformers has it; what cannot be cut is refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import DataError
from rlhf_trainer.generation.families import GENERATED, why_not_generated
from rlhf_trainer.hybrid_engine.layout import describe, generation_shards
from rlhf_trainer.stored_tensors import FLOAT32
from rlhf_trainer.training.loading import load_language_model, load_scorer, load_tokenizer
from rlhf_trainer.training.saving import save_model
from rlhf_trainer.training.sharding import impossible_sizes, shard
from rlhf_trainer.training.trainer import ModelRunner
from tests.each import each_case
from tests.trainer.families import FAMILIES, MIXTURES, NOT_GENERATING, NOT_SCORING, PAGE, PIPELINE, TENSOR, written
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.reading import all_tokens, log_probs
from tests.trainer.tiny import save_tiny

TOKENS = torch.randint(3, 512, (3, 20), generator=torch.Generator().manual_seed(0))


def saved(family: str, folder: Path, labels: int | None = None) -> str:
    """A model of the family; a bias of routers, which a new model has as zeros, decides for some tokens."""
    save_tiny(folder, seed=4, labels=labels, config=copy.deepcopy(FAMILIES[family]))
    weights, values = load_file(folder / "model.safetensors"), torch.linspace(-0.3, 0.3, 4)
    biases = {name: values + 1e-5 for name in weights if name.endswith("e_score_correction_bias")}
    save_file(weights | biases, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def read_and_save(folder: str, output: str, layout: ParallelSizes) -> Tensor:
    """The log-probabilities by the trainer, in rows that are packed, and the model as the trainer saves it."""
    model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    sharded = shard(model, layout, compute_dtype=torch.float32, recompute_activations=False)
    engine = ModelRunner(sharded, token_budget=1000, role="actor", offload="None", attention="Auto")
    found = engine.infer({"tokens": TOKENS}, all_tokens, log_probs)
    save_model(sharded, load_tokenizer(folder, trust_remote_code=False, revision=None), Path(output))
    return found


def require_as_transformers(family: str, folder: Path, layout: ParallelSizes) -> None:
    """float32 differs by the order of sums."""
    before = saved(family, folder / "before")
    found, *_ = run_kept_ranks(layout.world_size, read_and_save, before, str(folder / "after"), layout)
    model = AutoModelForCausalLM.from_pretrained(before, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(TOKENS).logits.log_softmax(-1)[:, :-1].gather(2, TOKENS[:, 1:, None])[..., 0]
    torch.testing.assert_close(found[:, 1:], expected, rtol=0, atol=2e-5)
    old, new = (load_file(folder / name / "model.safetensors") for name in ("before", "after"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert type(AutoModelForCausalLM.from_pretrained(folder / "after")) is type(model)


def every_other(families: Iterable[str], *, first: int) -> list[Any]:
    """Mark the others as slow: `make test` cuts a family in one of two ways."""
    marked = enumerate(sorted(families))
    return [pytest.param(each, marks=[pytest.mark.slow] * (number % 2 != first)) for number, each in marked]


UNCUT = ("Llama", *(family for family in FAMILIES if family not in TENSOR))
"""Families that the fast tests read on one rank; they read half of the others on two, in cut layers."""


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each not in UNCUT)) for each in FAMILIES]
)
def test_log_probs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    require_as_transformers(family, tmp_path, ParallelSizes(data=1))


def test_ranks_that_share_experts_say_the_same(tmp_path: Path) -> None:
    require_as_transformers("Qwen3-MoE", tmp_path, ParallelSizes(data=3))


def test_an_expert_that_is_missing_or_of_another_size_is_told(tmp_path: Path) -> None:
    folder = saved("Qwen3-MoE", tmp_path)
    weights, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.experts.{}.up_proj.weight"
    for change, sentence in {
        "missing": "the weights lack 2,048 elements of model.layers.1.mlp.experts.gate_up_proj",
        "short": "model.layers.1.mlp.experts.1.up_proj.weight is [31, 64] in the weights, and [32, 64] by config.json",
    }.items():
        changed = {own: tensor for own, tensor in weights.items() if own != name.format(1)}
        if change == "short":
            changed[name.format(1)] = weights[name.format(1)][:31].contiguous()
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(DataError, match=f"^{re.escape(f'{folder}: {sentence}')}$"):
            load_language_model(folder, seed=0, trust_remote_code=False, revision=None)


@pytest.mark.parametrize("family", every_other(TENSOR, first=0))
def test_layers_that_are_cut_say_the_same(family: str, tmp_path: Path) -> None:
    require_as_transformers(family, tmp_path, ParallelSizes(data=1, tensor=2))


@pytest.mark.parametrize("family", every_other(PIPELINE, first=1))
def test_stages_say_the_same(family: str, tmp_path: Path) -> None:
    require_as_transformers(family, tmp_path, ParallelSizes(data=1, pipeline=2))


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[pytest.mark.slow] * (each not in ("GPT-2", "DeepSeek-V3"))) for each in FAMILIES],
)
def test_rows_that_are_cut_say_the_same(family: str, tmp_path: Path) -> None:
    require_as_transformers(family, tmp_path, ParallelSizes(data=1, context=2))


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_over_ranks_say_the_same(family: str, tmp_path: Path) -> None:
    require_as_transformers(family, tmp_path, ParallelSizes(data=2, expert=2))


def test_a_bias_that_balances_routers_stays_float32(tmp_path: Path) -> None:
    folder = saved("DeepSeek-V3", tmp_path / "before")
    weights = {
        name: each if name.endswith(FLOAT32) else each.bfloat16()
        for name, each in load_file(f"{folder}/model.safetensors").items()
    }
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "before/config.json").read_text())
    (tmp_path / "before/config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    run_kept_ranks(2, read_and_save, folder, str(tmp_path / "after"), ParallelSizes(data=2, expert=2))
    after = load_file(tmp_path / "after/model.safetensors")
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    assert {each.dtype for name, each in after.items() if name.endswith(FLOAT32)} == {torch.float32}


def test_experts_that_cannot_be_divided_are_told() -> None:
    for family, expert, reason in (
        ("Qwen3-MoE", 3, "expert is 3, which does not divide the model's 4 experts; expected 1, 2 or 4"),
        ("Qwen3-MoE", 8, "expert is 8, which is more than the model's 4 experts; expected 1, 2 or 4"),
        ("Llama", 2, "expert is 2, but the model has no experts"),
    ):
        assert impossible_sizes(FAMILIES[family], pipeline=1, tensor=1, expert=expert) == reason
    other = copy.deepcopy(FAMILIES["Qwen3-MoE"])
    other.model_type = "jamba"
    said = "but only mixtral, qwen2_moe, qwen3_moe, olmoe or deepseek_v3 can be cut by experts, not jamba"
    assert impossible_sizes(other, pipeline=1, tensor=1, expert=2) == f"expert is 2, {said}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_scores_and_is_cut_as_the_table_says(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]
    assert bool(impossible_sizes(config, pipeline=1, tensor=2)) == (family not in TENSOR)
    assert bool(impossible_sizes(config, pipeline=2, tensor=1)) == (family not in PIPELINE)
    assert bool(impossible_sizes(config, pipeline=1, tensor=1, expert=2)) == (family not in MIXTURES)
    if family in NOT_SCORING:
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            AutoModelForSequenceClassification.from_config(config)
        return
    folder = saved(family, tmp_path, labels=1)
    scorer = load_scorer(
        folder, path="spec.models.reward", may_add_head=False, seed=0, trust_remote_code=False, revision=None
    )
    assert scorer.weights


@each_case("family", FAMILIES)
def test_each_parameter_has_a_place_in_generation(family: str) -> None:
    config = copy.deepcopy(FAMILIES[family])
    config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    assert bool(why_not_generated(config, on_cpu=True)) == (family in NOT_GENERATING)
    model = describe(config)
    assert generation_shards(model, ParallelSizes(data=1), 0).keys() == {parameter.name for parameter in model}


def test_the_page_has_the_table_of_these_tests() -> None:
    """`python -m tests.trainer.families` writes it."""
    page = PAGE.read_text()
    assert page == written(page)


def test_each_family_that_generates_has_a_model_here() -> None:
    assert {config.model_type for name, config in FAMILIES.items() if name not in NOT_GENERATING} == {*GENERATED}
