"""The slices of a layout are what torch and vLLM hold."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.hybrid_engine.layout import Parameter, describe, generation_shards, training_shards
from rlhf_trainer.tensor_slice import TensorSlice
from tests.each import each_case
from tests.trainer.hybrid_engine.families import config
from tests.trainer.ranks import run_kept_ranks

LAYER_PLAN: dict[str, Any] = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def made(of: PreTrainedConfig) -> Any:
    """A model with the weights of seed 0."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(of, dtype=torch.float32)


def mismatches(of: PreTrainedConfig, layout: ParallelSizes, shards: int) -> list[str]:
    """The parameters of which DTensor holds something else on this rank than the layout says."""
    full = {name: weight.detach().clone() for name, weight in made(of).named_parameters()}
    model = made(of)
    replicas = layout.data // shards
    mesh = init_device_mesh("cpu", (replicas, shards, layout.tensor), mesh_dim_names=("replica", "shard", "tensor"))
    if layout.tensor > 1:
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tensor"], LAYER_PLAN)
        ends: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tensor"], ends)
        if of.tie_word_embeddings:  # parallelize_module gives the head a weight of its own
            model.lm_head.weight = model.model.embed_tokens.weight
    data = mesh["replica", "shard"] if replicas > 1 else mesh["shard"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    slices = training_shards(describe(of), replace(layout, replicas=replicas), torch.distributed.get_rank())
    wrong = []
    for name, weight in model.named_parameters():
        assert isinstance(weight, DTensor)
        part = slices.pop(name)
        if not torch.equal(weight.to_local(), full[name][part.within(TensorSlice.whole(full[name].shape))]):
            wrong.append(f"{name}: {part} is not the local shard {tuple(weight.to_local().shape)}")
    return wrong + list(slices)


@each_case(
    ("family", "changed", "layout", "shards"),
    [
        ("qwen2", {"tied": True, "hidden_size": 36, "head_dim": 4}, ParallelSizes(data=2, tensor=2), 2),
        ("qwen3", {"tied": False, "vocabulary": 250, "head_dim": 6}, ParallelSizes(data=4), 4),
        ("llama", {"tied": False, "vocabulary": 250}, ParallelSizes(data=4), 2),
        (
            "llama",
            {"tied": False, "vocabulary": 250, "attention_bias": True, "mlp_bias": True},
            ParallelSizes(data=1, tensor=4),
            1,
        ),
    ],
    ids=["FSDP in TP", "uneven FSDP", "HSDP", "TP with biases"],
)
def test_training_shards_are_what_dtensor_holds(
    family: str, changed: dict[str, Any], layout: ParallelSizes, shards: int
) -> None:
    assert run_kept_ranks(4, mismatches, config(family, **changed), layout, shards) == [[]] * 4


@each_case("count", [1, 2, 3, 4, 7])
@each_case("size", [1, 2, 5, 6, 12])
def test_a_chunk_is_that_of_torch(size: int, count: int) -> None:
    parts = [TensorSlice.whole((size,)).chunk(0, index, count) for index in range(count)]
    expected = [len(part) for part in torch.arange(size).chunk(count)]
    assert [part.numel for part in parts] == expected + [0] * (count - len(expected))
    assert [row for part in parts for row in range(*part.starts, *part.stops)] == list(range(size))


@each_case("family", ["llama", "qwen2", "qwen3"])
@each_case("tied", [True, False])
def test_a_description_has_the_names_and_shapes_of_the_model(family: str, tied: bool) -> None:
    model = describe(config(family, tied=tied))
    expected = {name: tuple(weight.shape) for name, weight in made(config(family, tied=tied)).named_parameters()}
    assert {parameter.name: parameter.shape for parameter in model} == expected
    assert list(expected) == [parameter.name for parameter in model]


def named(model: list[Parameter]) -> dict[str, Parameter]:
    return {parameter.name: parameter for parameter in model}


def test_a_description_says_what_is_split_and_where_it_is_used() -> None:
    qwen2, qwen3 = named(describe(config("qwen2", tied=True))), named(describe(config("qwen3", tied=False)))
    biased = named(describe(config("llama", attention_bias=True)))
    layer = "model.layers.3.self_attn."
    assert qwen2["model.embed_tokens.weight"].positions == ("first", "last")
    assert qwen3["model.embed_tokens.weight"].positions == ("first",)
    assert (qwen3["lm_head.weight"].positions, qwen3["lm_head.weight"].tensor_dim) == (("last",), 0)
    assert qwen2["model.norm.weight"].positions == ("last",)
    assert qwen2[f"{layer}k_proj.bias"].positions == (3,)
    assert (qwen2[f"{layer}k_proj.bias"].tensor_dim, qwen2[f"{layer}k_proj.bias"].heads) == (0, 4)
    assert (qwen2[f"{layer}o_proj.weight"].tensor_dim, biased[f"{layer}o_proj.bias"].tensor_dim) == (1, None)
    assert qwen3[f"{layer}q_norm.weight"].tensor_dim is None


def test_a_style_of_splitting_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    strange = config()
    plan = {**type(strange).base_model_tp_plan, "layers.*.mlp.up_proj": "packed_colwise"}
    monkeypatch.setattr(type(strange), "base_model_tp_plan", plan)
    model = describe(strange)
    training_shards(model, ParallelSizes(data=1), 0)
    generation_shards(model, ParallelSizes(data=1), 0)
    what = r"transformers splits model.layers.0.mlp.up_proj.weight as packed_colwise, which is not supported"
    with pytest.raises(ConfigError, match=rf"^spec\.models\.actor\.parallelism\.tensor: expected 1, for {what}"):
        training_shards(model, ParallelSizes(data=1, tensor=2), 0)


def test_stages_hold_their_layers_and_both_ends_a_tied_embedding() -> None:
    model = describe(config("llama", tied=True, num_hidden_layers=3))
    slices = [training_shards(model, ParallelSizes(data=1, pipeline=2), rank) for rank in range(2)]
    layers = [{name.split(".")[2] for name in held if "layers" in name} for held in slices]
    assert layers == [{"0", "1"}, {"2"}]
    assert ["model.embed_tokens.weight" in held for held in slices] == [True, True]
    assert ["model.norm.weight" in held for held in slices] == [False, True]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline: 4 stages are more than the 2 layers"):
        training_shards(describe(config(num_hidden_layers=2)), ParallelSizes(data=1, pipeline=4), 0)


def rows(slices: list[dict[str, TensorSlice]], name: str, dim: int = 0) -> list[tuple[int, int]]:
    return [(held[name].starts[dim], held[name].stops[dim]) for held in slices]


def test_generation_shards_are_those_of_vllm() -> None:
    """250 words are padded to 256; 2 KV heads of 4 rows are shared by 4 ranks; o_proj is split in its columns."""
    model = describe(config("qwen3", tied=False, vocabulary=250, num_key_value_heads=2))
    slices = [generation_shards(model, ParallelSizes(data=1, tensor=4), rank) for rank in range(4)]
    attention = "model.layers.0.self_attn."
    assert rows(slices, "lm_head.weight") == [(0, 64), (64, 128), (128, 192), (192, 250)]
    assert rows(slices, f"{attention}q_proj.weight") == [(0, 8), (8, 16), (16, 24), (24, 32)]
    assert rows(slices, f"{attention}k_proj.weight") == [(0, 4), (0, 4), (4, 8), (4, 8)]
    assert rows(slices, f"{attention}o_proj.weight") == [(0, 32)] * 4
    assert rows(slices, f"{attention}o_proj.weight", dim=1) == [(0, 8), (8, 16), (16, 24), (24, 32)]
    assert rows(slices, f"{attention}q_norm.weight") == [(0, 4)] * 4


def test_a_last_shard_may_be_all_padding() -> None:
    model = describe(config(vocabulary=70))
    slices = [generation_shards(model, ParallelSizes(data=1, tensor=4), rank) for rank in range(4)]
    assert rows(slices, "model.embed_tokens.weight") == [(0, 32), (32, 64), (64, 70), (70, 70)]


def test_generation_stages_join_training_stages() -> None:
    model, sizes = describe(config(tied=False)), ParallelSizes(data=1, pipeline=4, generation_pipeline=2)
    slices = [generation_shards(model, sizes, rank) for rank in range(4)]
    layers = [sorted({name.split(".")[2] for name in held if "layers" in name}) for held in slices]
    assert layers == [["0", "1"], ["0", "1"], ["2", "3"], ["2", "3"]]


def test_sizes_that_cannot_be_shared_equally_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.tensorParallel: 3 ranks cannot share .*embed_tokens"):
        generation_shards(describe(config()), ParallelSizes(data=1, tensor=3), 0)
