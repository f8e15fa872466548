"""Bytes of a GPU, each term worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import Software
from rlhf_mapper.simulate import layer, memory
from rlhf_mapper.simulate.layouts import Layouts
from tests.each import each_case
from tests.mapper.oracles.testbed import MODELS, SOFTWARE
from tests.mapper.test_simulators_by_hand import MIXTURE, SHARDED, SMALL, WHOLE, layout


def test_states_are_18_and_2_bytes_a_parameter_on_the_testbed() -> None:
    trained, frozen = (memory.states(MODELS["7B"], SOFTWARE, trains=trains) for trains in (True, False))
    assert sum(trained.values()) == 18 * MODELS["7B"].parameters
    assert frozen == {"weights": 2 * MODELS["7B"].parameters}


def test_of_whole_replicas_only_the_optimizer_is_shared() -> None:
    sizes = [
        sum(
            memory.parts_of_gpu(
                memory.states(SMALL, software, trains=True), software, replica=2, gpus=np.array(8.0)
            ).values()
        )
        / SMALL.parameters
        for software in (WHOLE, replace(WHOLE, shards_weights=True))
    ]
    assert sizes == pytest.approx([(2 + 4) / 2 + 12 / 8, (2 + 12) / 8]), "FSDP has gradients in an update only"


def held(
    layouts: Layouts, *, software: Software = WHOLE, model: Architecture = SMALL, tokens: float = 100, **how: bool
) -> float:
    """Bytes of an update of so many tokens."""
    chosen = replace(memory.Update(recomputes=False, accumulates=False, gpu_memory=80e9), **how)
    return float(memory.fullest(memory.updating(model, software, layouts, tokens, chosen), tokens))


def test_whole_replicas_activations_are_flash_attentions() -> None:
    h, logits = SMALL.hidden, 100 * 1000 * 8
    one = 100 * h * 34
    reads = memory.fullest(memory.reading(SMALL, WHOLE, layout(), 100), 100)
    assert reads - logits == one
    assert held(layout()) - logits == 8 * one
    assert held(layout(), recomputes=True) - logits == 2 * 100 * h * 8 + one
    assert held(layout(p=4)) - logits == 8 * one, "the first stage holds a micro-batch for each stage"
    assert held(layout(p=4), recomputes=True) - logits == 2 * 100 * h * 8 + one
    assert held(layout(t=2)) - logits / 2 == 8 * 100 * h * (10 + 12)


def test_a_layer_keeps_what_its_modules_save() -> None:
    """Counted by hand in bytes of a token, in bfloat16 with FlashAttention."""
    h, norm = SMALL.hidden, 4 + 2 + 2
    mlp, attention, sums = 4 * 2 * SMALL.ffn, 4 * 2 * h, 4 * SMALL.heads
    plain = layer.kept(SMALL, SHARDED).on(SMALL, layout())
    assert plain == 2 * norm * h + mlp + attention + sums
    cut = layer.kept(SMALL, SHARDED).on(SMALL, layout(t=2))
    assert cut == 2 * 2 * h + (2 * (norm - 2) * h + mlp + attention + sums) / 2, "whole are the inputs of cut matrices"
    qwen3 = replace(SMALL, norms_heads=True)
    assert layer.kept(qwen3, SHARDED).on(qwen3, layout()) == plain + 2 * (4 + 2) * h, "of queries and keys"
    sdpa = replace(SHARDED, attention="SDPA")
    assert layer.kept(SMALL, sdpa).on(SMALL, layout()) == plain + 2 * h, "a copy of the outputs"
    full = replace(SHARDED, compute_bytes=4)
    assert layer.kept(SMALL, full).on(SMALL, layout()) == 2 * 12 * h + 2 * (mlp + attention) + sums


def test_a_mixture_keeps_what_its_experts_save() -> None:
    k, f, h = MIXTURE.experts_per_token, MIXTURE.ffn, MIXTURE.hidden
    rest = 2 * (4 + 2 + 2) * h + 4 * 2 * h + 4 * MIXTURE.heads
    kept = layer.kept(MIXTURE, SHARDED)
    assert kept.on(MIXTURE, layout()) == rest + k * (8 * f + 2 * 2 * h), "inputs and outputs of experts"
    exchanged = kept.on(MIXTURE, layout(d=8, e=8))
    assert exchanged == pytest.approx(rest + 1.2 * k * (8 * f + 3 * 2 * h)), "and what comes back, on the fullest rank"


def test_a_rank_holds_its_part_of_a_layers_experts() -> None:
    few = 1.0
    whole, part = (
        held(layout(d=8, e=e), software=SHARDED, model=replace(MIXTURE, layers=64), tokens=few) for e in (1, 8)
    )
    experts = 16 * 3 * MIXTURE.hidden * MIXTURE.ffn
    gathered = (2 * 2 + 4) * experts - (2 + 4) * experts / 8
    assert whole - part == pytest.approx(gathered, rel=0.01), "two layers, of parts one, and gradients of one"


def test_ranks_of_a_row_shard_the_states_of_one_copy() -> None:
    alone, together = (held(cut, software=SHARDED, tokens=100) for cut in (layout(d=8), layout(d=2, c=4)))
    assert together == alone, "a rank has 100 tokens in both"


COUNTED: dict[str, tuple[Architecture, float]] = {
    "Llama-2-7B": (MODELS["7B"], 45),
    "Llama-3.1-8B": (replace(MODELS["7B"], kv_heads=8, ffn=14336), 49),
    "Qwen3-8B": (replace(MODELS["7B"], kv_heads=8, ffn=12288, norms_heads=True), 53),
    "Qwen2.5-7B": (replace(MODELS["7B"], hidden=3584, heads=28, kv_heads=4, ffn=18944), 63),
    "Qwen3-32B": (replace(MODELS["7B"], hidden=5120, heads=64, kv_heads=8, ffn=25600, norms_heads=True), 74),
}
"""Bytes a token and hidden unit that were counted on the modules of transformers (issue J)."""


@each_case("name", COUNTED)
def test_a_layer_keeps_what_was_counted(name: str) -> None:
    model, counted = COUNTED[name]
    assert layer.kept(model, SHARDED).on(model, layout()) / model.hidden == pytest.approx(counted, abs=0.6)


def test_recomputing_keeps_the_inputs_of_layers_and_one_layer() -> None:
    deep = replace(SMALL, layers=64, scores=True)
    one, inputs = float(layer.kept(deep, SHARDED).on(deep, layout())), 2 * deep.hidden
    kept, again = (
        held(layout(), software=SHARDED, model=deep, tokens=10_000, recomputes=each) for each in (False, True)
    )
    assert kept - again == pytest.approx(10_000 * (63 * one - 64 * inputs))


def test_gradients_of_earlier_micro_batches_wait() -> None:
    """Whole where they take little of the GPU, and else this rank's shards."""
    more = [
        held(layout(d=8), software=SHARDED, model=model, tokens=4000, accumulates=True)
        - held(layout(d=8), software=SHARDED, model=model, tokens=4000)
        for model in (replace(SMALL, scores=True), replace(MODELS["7B"], scores=True))
    ]
    layers = [model.layers * model.layer_parameters for model in (SMALL, MODELS["7B"])]
    assert more[0] == pytest.approx(4 * (layers[0] + (1000 + 1) * SMALL.hidden), rel=0.01)
    assert more[1] == pytest.approx(4 * layers[1] / 8, rel=0.35), "the first backward pass need not be the fullest"


def test_the_head_takes_logits_in_chunks() -> None:
    wide = replace(SMALL, layers=1, vocabulary=151936)
    few, many = (held(layout(), software=SHARDED, model=wide, tokens=tokens) for tokens in (1767, 17670))
    assert many < 2 * few, "of 1,767 tokens it has 2**28 logits, and never more"


def test_a_micro_batch_fills_the_room_at_its_fullest_moment() -> None:
    how = memory.Update(recomputes=True, accumulates=True, gpu_memory=80e9)
    moments = memory.updating(MODELS["7B"], SHARDED, layout(d=8), 16384, how)
    most = float(memory.most_tokens(moments, 30e9))
    assert memory.fullest(moments, most) == pytest.approx(30e9)
    assert memory.most_tokens(moments, 1e9) < 1, "no room for what is gathered"


def test_small_pinned_memory_comes_in_powers_of_two() -> None:
    one = replace(SMALL, layers=1, kv_heads=3)
    sizes = [384 * 384, 384 * 384, 384 * 192, 384 * 192, *[384 * 1024] * 3, 1000 * 384, 1000 * 384]
    parts = [4 * size / 8 for size in sizes]
    assert memory.pinned(one, [4], np.array(8.0)) == sum(1 << (int(part) - 1).bit_length() for part in parts)
    assert memory.pinned(one, [4], np.array(0.25)) == 16 * sum(sizes), "each is more than 1 MiB"


def test_a_reshard_has_three_buckets() -> None:
    assert memory.reshard_bytes(SHARDED, np.array([4.8e9, 480e9])).tolist() == [3 * 1e8, 3 * 512 * 2**20]
    assert memory.reshard_bytes(WHOLE, np.array([4.8e9])) == 0


def test_gradients_of_an_optimizer_in_the_host_leave_the_gpu() -> None:
    large = replace(MODELS["7B"], scores=True)
    here, there = (
        held(layout(d=2), software=SHARDED, model=large, tokens=100, recomputes=True, accumulates=True, in_host=each)
        for each in (False, True)
    )
    assert here - there > 4 * large.layers * large.layer_parameters / 2 / 2, "most of the shards"


def test_gradients_are_summed_during_the_next_layers_pass() -> None:
    deep = replace(SMALL, layers=64, scores=True)
    h, parameters, root = deep.hidden, deep.layer_parameters, 1001 * deep.hidden
    gathered = 2 * (root + 2 * parameters + h)
    one = float(layer.kept(deep, SHARDED).on(deep, layout())) + 16 * h + 6 * deep.ffn

    def fullest(tokens: float, *, accumulates: bool = False) -> float:
        return held(layout(d=8), software=SHARDED, model=deep, tokens=tokens, recomputes=True, accumulates=accumulates)

    few, many = 100, 5000
    shards, summed = 4 * 64 * parameters / 8, 4 * parameters
    assert fullest(few) == pytest.approx(gathered + shards + summed + few * (2 * h + one)), "the first layer's"
    assert fullest(many) == pytest.approx(gathered + summed + many * (63 * 2 * h + one)), "the second last's"
    waiting = 4 * (64 * parameters + root)
    assert fullest(many, accumulates=True) == pytest.approx(gathered + waiting + many * (64 * 2 * h + one))


def test_a_small_stage_is_gathered_at_once() -> None:
    small = replace(SMALL, layers=2, scores=True)
    whole = 2 * (2 * small.layer_parameters + 1001 * small.hidden)
    assert memory.fullest(memory.reading(small, SHARDED, layout(d=8), 1), 1) == 2 * whole
