"""The cost models on hardware so ideal that each term can be worked out alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import TRAINER, Efficiency, Software
from rlhf_mapper.hardware import Gpu, NodeGroup
from rlhf_mapper.search.objective import Objective
from rlhf_mapper.simulate import generation, training
from rlhf_mapper.simulate.layouts import Layouts, Network, ring
from rlhf_mapper.simulate.overlap import groups_of, stages_of
from rlhf_mapper.simulate.passes import Passes
from rlhf_mapper.workload import Lengths, Work, Workload
from tests.each import each_case
from tests.mapper.oracles.testbed import LAYOUTS, MODELS, SOFTWARE, Size, machines

ENDLESS = 1e30
IDEAL = Efficiency(
    kernel=1,
    scoring=1,
    prefill=1,
    balance=1,
    rollout=1,
    memory=1,
    link=1,
    network=1,
    decode_seconds=0,
    sequence_seconds=0,
    update_seconds=0,
    call_seconds=0,
    stage_seconds=0,
    transition_seconds=0,
)
WHOLE = replace(SOFTWARE, efficiency=IDEAL, rereads_kv=False)
"""Data-parallel ranks hold whole replicas."""
SHARDED = replace(TRAINER, efficiency=IDEAL, products="Roofline")
GPU = Gpu(
    name="ideal",
    memory=80e9,
    bf16=ENDLESS,
    fp32=ENDLESS,
    memory_bandwidth=ENDLESS,
    link_bandwidth=ENDLESS,
    host_bandwidth=ENDLESS,
    launch_seconds=0,
    source="",
)
NODES = NodeGroup(gpu=GPU, count=16, gpus_per_node=8, node_bandwidth=ENDLESS, link_latency=0, node_latency=0)
SMALL = Architecture(layers=8, hidden=384, heads=6, kv_heads=6, head_size=64, ffn=1024, vocabulary=1000)
"""The MLP has 3 h 8/3 h weights, as many as one of 4 h without a gate."""
MIXTURE = replace(SMALL, ffn=256, experts=16, experts_per_token=2, scores=True)
TABLE_2: dict[Size, float] = {"7B": 5.25 / 14, "13B": 3.25 / 26, "34B": 6.375 / 68, "70B": 15.3125 / 140}
"""Received bytes over the actor's bytes."""


def layout(p: int = 1, t: int = 1, d: int = 1, c: int = 1, e: int = 1) -> Layouts:
    return Layouts(*(np.array(float(size)) for size in (p, t, d, c, e)))


def passes(model: Architecture = SMALL, software: Software = WHOLE, nodes: NodeGroup = NODES, **gpu: float) -> Passes:
    return Passes(model, replace(nodes, gpu=replace(GPU, **gpu)), software)  # type: ignore[arg-type]


def a_step(prompt: float = 100, response: float = 60) -> Workload:
    return Workload(sequences=64, prompt=Lengths((prompt,)), response=Lengths((response,)), work={})


def forward_flops(model: Architecture, sequences: int, tokens: int) -> float:
    """24 b L s h^2 (1 + s / 12h + V / 12Lh): of the attention's square half, as it is causal."""
    h, layers = model.hidden, model.layers
    return (
        24
        * sequences
        * layers
        * tokens
        * h**2
        * (1 + tokens / (12 * h) + (1 if model.scores else model.vocabulary) / (12 * layers * h))
    )


@pytest.mark.parametrize(("micro_batch", "tokens"), [(1, 160), (2, 50 + 60), (8, 25 + 60)])
def test_sequences_with_one_prompt_compute_it_once(micro_batch: int, tokens: int) -> None:
    """Prompts of 100 tokens, of which 4 responses of 60 have one."""
    model, size = passes(bf16=1e12), np.array(float(micro_batch))
    one = model.compute(layout(), size, tokens) * 64 / micro_batch
    read = training.inference_seconds(model, Work(read=64, read_together=4), a_step(), layout(), size)
    assert read == pytest.approx(one)
    trained = training.training_seconds(
        model, Work(trained=64, updates=1, trained_together=4), a_step(), layout(), size
    )
    assert trained == pytest.approx(3 * one)


@pytest.mark.parametrize("scores", [False, True])
def test_a_forward_pass_takes_its_flops(scores: bool) -> None:
    model = replace(SMALL, scores=scores)
    seconds = passes(model, bf16=1e12).compute(layout(), np.array(3.0), 700)
    assert seconds * 1e12 == pytest.approx(forward_flops(model, 3, 700))


def test_of_a_forward_pass_each_stage_and_shard_does_its_part() -> None:
    model = replace(SMALL, scores=True)
    whole = passes(model, bf16=1e12).compute(layout(), np.array(3.0), 700)
    shard = passes(model, bf16=1e12).compute(layout(t=2), np.array(3.0), 700)
    stage = passes(model, bf16=1e12).compute(layout(p=4), np.array(3.0), 700)
    assert shard == pytest.approx(whole / 2)
    assert stage == pytest.approx(whole / 4, rel=1e-3), "but for the head, which is not cut"


def test_full_precision_has_its_own_peak() -> None:
    slow = passes(software=replace(WHOLE, compute_bytes=4), bf16=8e12, fp32=1e12)
    fast = passes(bf16=8e12, fp32=1e12)
    ratio = slow.compute(layout(), np.array(1.0), 100) / fast.compute(layout(), np.array(1.0), 100)
    assert ratio == pytest.approx(8)


def test_a_layer_takes_no_less_than_its_weights_or_its_kernels() -> None:
    read = passes(memory_bandwidth=1e9).compute(layout(), np.array(1.0), 0.0)
    assert read == pytest.approx(SMALL.layers * SMALL.layer_parameters * 2 / 1e9)
    started = passes(launch_seconds=1e-5).compute(layout(), np.array(1.0), 0.0)
    assert started == pytest.approx(SMALL.layers * 12 * 1e-5)


def prefilled(model: Passes, cut: Layouts, sequences: float) -> float:
    """Seconds of prompts of 100 tokens through all stages, the last token of each through the head."""
    count = np.array(sequences)
    read = model.layers(cut, count, 100) + model.head(cut, count) + model.tensor_parallel(cut, count * 100)
    return float(cut.p * read)


@pytest.mark.parametrize(("t", "p"), [(1, 1), (2, 1), (2, 2)])
def test_a_decode_step_of_one_sequence_reads_weights_and_cache(t: int, p: int) -> None:
    load, work = a_step(), Work(generated=1, passes=1)
    seconds = generation.generation_seconds(passes(memory_bandwidth=1e9), work, load, layout(p, t), np.array(1e9))
    prefill = prefilled(passes(memory_bandwidth=1e9), layout(p, t), 1.0)
    weights, cache = SMALL.parameters * 2, 2 * 8 * 6 * 64 * 2 * (100 + 60 / 2)
    assert seconds - prefill == pytest.approx(60 * (weights + cache) / t / 1e9)


def test_a_quantised_generator_reads_fewer_bytes() -> None:
    load, work, rounded = a_step(), Work(generated=1, passes=1), replace(WHOLE, linear_bytes=1, cache_bytes=1)
    model = passes(software=rounded, memory_bandwidth=1e9)
    seconds = generation.generation_seconds(model, work, load, layout(), np.array(1e9))
    linear = 8 * (4 * 384 * 384 + 3 * 384 * 1024)
    weights, cache = linear + 2 * (SMALL.parameters - linear), 8 * 6 * 64 * 2 * (100 + 60 / 2)
    assert generation.weights_of_gpu(model, layout()) == weights
    assert generation.sent_to_gpu(model, layout()) == 2 * SMALL.parameters, "weights are sent as they were trained"
    assert seconds - prefilled(model, layout(), 1.0) == pytest.approx(60 * (weights + cache) / 1e9)


def test_a_cache_of_two_sequences_makes_waves() -> None:
    model, load = passes(memory_bandwidth=1e9), a_step()
    one = float(generation.cached_bytes(model, layout(), 160))
    assert one == 2 * 8 * 6 * 64 * 160 * 2

    def waves(sequences: int, held: float) -> float:
        work = Work(generated=sequences, passes=1)
        seconds = generation.generation_seconds(model, work, load, layout(), np.array(held * one))
        rest = prefilled(model, layout(), float(sequences))
        rest += sequences * 60 * one * (130 / 160) / 1e9
        return float(seconds - rest) / (60 * SMALL.parameters * 2 / 1e9)

    assert waves(6, 2) == pytest.approx(3)
    assert waves(6, 6.5) == pytest.approx(1)
    assert waves(7, 2.9) == pytest.approx(4)
    assert np.isinf(
        generation.generation_seconds(model, Work(generated=1, passes=1), load, layout(), np.array(0.9 * one))
    )


def test_few_kv_heads_are_copied_over_the_shards() -> None:
    few = passes(replace(SMALL, kv_heads=2))
    cached = [float(generation.cached_bytes(few, layout(t=t, p=p), 10)) for t, p in ((1, 1), (2, 1), (6, 1), (1, 2))]
    assert cached == [cached[0], cached[0] / 2, cached[0] / 2, cached[0] / 2]


def test_an_old_generator_rereads_the_cache_for_each_head() -> None:
    model = replace(SMALL, kv_heads=2)
    work, load = Work(generated=1, passes=1), a_step()
    once, often = (
        generation.generation_seconds(
            passes(model, replace(WHOLE, rereads_kv=again), memory_bandwidth=1e9), work, load, layout(), np.array(1e9)
        )
        for again in (False, True)
    )
    cache = 60 * 2 * 8 * 2 * 64 * 2 * 130 / 1e9
    assert often - once == pytest.approx(2 * cache), "a group has three query heads"


@each_case("size", MODELS)
def test_a_transition_receives_what_table_2_says(size: Size) -> None:
    model = Passes(MODELS[size], machines(64), SOFTWARE)
    p, t, t_g = LAYOUTS[size]
    whole = MODELS[size].parameters * 2
    received = float(generation.received_bytes(model, Work(), layout(p, t, 2), layout(1, t_g)))
    assert received == pytest.approx((t * p - t_g) / (t_g * t * p) * whole)
    assert received / whole == pytest.approx(TABLE_2[size])


def test_a_gpu_receives_its_shard_less_its_own_part() -> None:
    whole = SMALL.parameters * 2
    received = generation.received_bytes(passes(software=SHARDED), Work(), layout(1, 2, 4), layout(1, 2))
    assert received == pytest.approx(whole / 2 - whole / 8)
    assert generation.received_bytes(passes(software=SHARDED), Work(), layout(1, 4, 1), layout(1, 4)) == 0


def test_a_transition_takes_the_links_of_its_group() -> None:
    nodes = replace(NODES, link_bandwidth=200e9, node_bandwidth=8e9)
    model = passes(software=SHARDED, nodes=nodes)
    whole = SMALL.parameters * 2
    inside = generation.transition_seconds(model, Work(), layout(d=8), layout())
    assert inside == pytest.approx(whole * 7 / 8 / 100e9), "one direction"
    across = generation.transition_seconds(model, Work(), layout(d=16), layout())
    assert across == pytest.approx(whole * 15 / 16 / 1e9), "8 GPUs share the node's network"


def test_a_pipeline_fills_and_empties() -> None:
    model = passes(replace(SMALL, scores=True), bf16=1e12)
    load, work = a_step(), Work(trained=24, updates=2)
    one, four = (
        float(training.training_seconds(model, work, load, layout(p), np.array(2.0))) for p in (1, 4)
    )  # 6 micro-batches each
    assert one == pytest.approx(24 * 3 * forward_flops(model.model, 1, 160) / 1e12)
    assert four / one == pytest.approx((6 + 4 - 1) / 6 / 4, rel=1e-3)
    reads = [float(training.inference_seconds(model, Work(read=24), load, layout(p), np.array(2.0))) for p in (1, 4)]
    assert reads[0] == pytest.approx(24 * forward_flops(model.model, 1, 160) / 1e12)
    assert reads[1] / reads[0] == pytest.approx((12 + 4 - 1) / 12 / 4, rel=1e-3)


def test_recomputing_costs_a_forward_pass_more() -> None:
    model, load, work = passes(bf16=1e12), a_step(), Work(trained=8, updates=1)
    kept, again = (
        training.training_seconds(model, replace(work, recomputes=each), load, layout(), np.array(8.0))
        for each in (False, True)
    )
    layers, whole = float(model.layers(layout(), np.array(8.0), 160)), forward_flops(SMALL, 8, 160) / 1e12
    assert again / kept == pytest.approx(1 + layers / whole / 3), "the head is never recomputed"


def test_data_ranks_divide_a_mini_batch_the_slowest_counts() -> None:
    model, load = passes(bf16=1e12), a_step()
    one, ten = (
        training.training_seconds(model, Work(trained=20, updates=2), load, layout(d=d), np.array(1.0)) for d in (1, 4)
    )
    assert one / ten == pytest.approx(10 / 3), "10 sequences on 4 ranks are 3 on one of them"


@pytest.mark.parametrize("software", [WHOLE, SHARDED], ids=["whole", "sharded"])
def test_one_data_rank_has_nobody_to_synchronise_with(software: Software) -> None:
    load, work = a_step(), Work(trained=8, updates=1)
    slow = replace(NODES, link_bandwidth=2.0, node_bandwidth=1.0)
    alone, together = (
        training.training_seconds(passes(software=software, nodes=slow), work, load, layout(d=d), np.array(8.0))
        for d in (1, 2)
    )
    assert alone < 1e-9
    bytes_ = SMALL.parameters * (6 if software is WHOLE else 2 + 2 + 4)
    assert together == pytest.approx(bytes_ / 2, rel=1e-6), "a gigabyte a second in one direction, half is its own"


def test_gradients_hide_behind_the_last_backward_pass() -> None:
    load, work = a_step(), Work(trained=8, updates=1)
    model = passes(nodes=replace(NODES, link_bandwidth=1e9), bf16=1e12)
    quiet = training.training_seconds(passes(bf16=1e12), work, load, layout(d=2), np.array(4.0))
    took = training.training_seconds(model, work, load, layout(d=2), np.array(4.0)) - quiet
    backward = 2 * forward_flops(SMALL, 4, 160) / 1e12
    reduced, gathered = (SMALL.parameters * size / 2 / 0.5e9 for size in (4, 2))
    assert took == pytest.approx(max(reduced - backward, 0) + gathered)
    assert 0 < backward < reduced, "else this says nothing"


def test_adam_reads_and_writes_its_share() -> None:
    load, work = a_step(0, 0), Work(trained=8, updates=4)
    model = passes(replace(SMALL, layers=0, vocabulary=10**6, scores=True), WHOLE, memory_bandwidth=1e9)
    seconds = training.training_seconds(model, work, load, layout(), np.array(1.0))
    assert seconds == pytest.approx(4 * 34 * model.model.parameters / 1e9)


def test_a_ring_sends_all_but_its_own_share() -> None:
    assert ring(np.array([1.0, 2.0, 4.0])).tolist() == [0, 0.5, 0.75]
    model = passes(nodes=replace(NODES, link_bandwidth=2e9))
    bytes_ = 50 * SMALL.hidden * 2
    seconds = model.tensor_parallel(layout(t=4), np.array(50.0))
    assert seconds == pytest.approx(SMALL.layers * 2 * (2 * 0.75) * bytes_ / 1e9), "two all-reduces a layer"
    assert model.tensor_parallel(layout(t=1), np.array(50.0)) == 0


SLOW = replace(NODES, link_bandwidth=2e9, node_bandwidth=1.6e9)
"""1 GB/s in a node in one direction, and 0.2 GB/s of each GPU between nodes."""


@each_case(
    ("cut", "seconds"),
    [
        (layout(d=8, e=8), 7 / 8 / 1e9),
        (layout(t=4, d=2, e=8), 7 / 8 / 4 / 1e9),  # tensor-parallel ranks divide the tokens
        (layout(d=16, e=16), 8 / 16 / 0.2e9),  # half of the tokens leave the node
        (layout(p=2, d=8, e=8), 4 / 8 / 0.2e9),  # a stage has four ranks of a node
        (layout(d=8, e=1), 0.0),
    ],
)
def test_tokens_go_to_their_experts_and_come_back(cut: Layouts, seconds: float) -> None:
    sent = 1.2 * 100 * MIXTURE.experts_per_token * MIXTURE.hidden * 2
    layers = MIXTURE.layers / float(cut.p)
    assert passes(MIXTURE, nodes=SLOW).between_experts(cut, np.array(100.0)) == pytest.approx(
        2 * layers * sent * seconds
    )


def test_a_rank_gathers_its_part_of_the_experts() -> None:
    load, work = a_step(0, 0), Work(read=64)
    model = passes(MIXTURE, SHARDED, nodes=replace(NODES, link_bandwidth=2e9))
    experts = 2 * MIXTURE.layers * 16 * 3 * MIXTURE.hidden * MIXTURE.ffn
    dense = 2 * MIXTURE.parameters - experts

    def gathered(cut: Layouts) -> float:
        return float(training.inference_seconds(model, work, load, cut, np.array(64.0)))

    assert gathered(layout(d=8)) == pytest.approx((dense + experts) * 7 / 8 / 1e9)
    assert gathered(layout(d=8, e=4)) == pytest.approx((dense * 7 / 8 + experts / 4 * 1 / 2) / 1e9)
    assert gathered(layout(d=8, e=8)) == pytest.approx(dense * 7 / 8 / 1e9)
    assert gathered(layout(t=2, d=4, e=8)) == pytest.approx(dense / 2 * 3 / 4 / 1e9)


@each_case(
    ("cut", "heads"),
    [
        (layout(c=2), 4 * 6),
        (layout(t=3, c=2), (2 * 6 + 2 * 6) / 3),
        (layout(c=4), 2 * 4 * 6),  # six heads are no multiple of 4: keys and values of all
        (layout(c=1), 0),
    ],
)
def test_ranks_of_a_row_exchange_heads_or_keys(cut: Layouts, heads: float) -> None:
    model = passes(nodes=SLOW)
    seconds = model.between_context(cut, np.array(100.0))
    assert seconds == pytest.approx(SMALL.layers * heads * 64 * 2 * 100 * float(1 - 1 / cut.c) / 1e9)


def test_few_keys_are_copied_for_the_ranks_of_a_row() -> None:
    few = passes(replace(SMALL, kv_heads=2), nodes=SLOW)
    seconds = few.between_context(layout(c=6), np.array(100.0))
    assert seconds == pytest.approx(SMALL.layers * (2 * 6 + 2 * 6) * 64 * 2 * 100 * 5 / 6 / 1e9)


def test_ranks_of_a_row_divide_its_work() -> None:
    load, work = a_step(0, 960), Work(trained=4, updates=1)
    one, two, four = (
        float(training.training_seconds(passes(bf16=1e12), work, load, layout(c=c), np.array(4.0))) for c in (1, 2, 4)
    )
    assert one / two == pytest.approx(2)
    attention = 3 * 4 * 8 * 2 * 960**2 * 384 / 1e12
    assert four == pytest.approx(one / 4 + (2 - 1 / 4 - 1) * attention / 4), (
        "all wait for the rank with the last tokens"
    )


def test_messages_take_their_latency() -> None:
    model = passes(nodes=replace(NODES, link_latency=1e-6, node_latency=1e-3))
    assert model.tensor_parallel(layout(t=4), np.array(0.0)) == pytest.approx(SMALL.layers * 2 * 6e-6)
    assert model.between_stages(layout(p=2, t=8), np.array(0.0)) == pytest.approx(1e-3)
    assert model.between_stages(layout(p=2, t=2), np.array(0.0)) == pytest.approx(1e-6)


def test_the_gpus_of_a_node_share_its_network() -> None:
    network = Network(replace(NODES, link_bandwidth=600e9, node_bandwidth=25e9), IDEAL)
    assert (network.within, network.between) == (300e9, 25e9 / 8)
    reached = [float(network.of_data_ranks(layout(*sizes))) for sizes in ((1, 8, 2), (1, 2, 8), (1, 1, 16), (1, 2, 4))]
    assert reached == [25e9 / 8, 25e9 / 2, 25e9, 300e9], "a node has as many rings as its replicas have ranks"


def test_responses_that_end_leave_the_others_a_faster_step() -> None:
    """4 sequences of 10, 20, 30 and 40 tokens, of which each decode step takes its number in milliseconds."""
    slow = replace(IDEAL, sequence_seconds=1e-3)
    model = passes(software=replace(WHOLE, efficiency=slow))
    load = replace(a_step(), response=Lengths((10, 20, 30, 40)))
    work, room = Work(generated=4, passes=1), np.array(1e9)
    seconds = generation.generation_seconds(model, work, load, layout(), room)
    assert seconds - prefilled(model, layout(), 4) == pytest.approx((10 + 20 + 30 + 40) / 1000, rel=0.01)
    alike = generation.generation_seconds(model, work, a_step(response=40), layout(), room)
    assert alike - prefilled(model, layout(), 4) == pytest.approx(4 * 40 / 1000)


def test_what_ends_makes_room_for_the_next() -> None:
    """8 sequences through room for 4: 4 at once for a mean length, then 4 that end one by one."""
    slow = replace(IDEAL, decode_seconds=1e-3)
    model = passes(software=replace(WHOLE, efficiency=slow, running_sequences=4))
    load = replace(a_step(), response=Lengths((10.0,) * 4 + (30.0,) * 4))
    seconds = generation.generation_seconds(model, Work(generated=8, passes=1), load, layout(), np.array(1e9))
    last = 10 + 20 * (1 - 0.5**4)
    assert seconds - prefilled(model, layout(), 8) == pytest.approx((20 + last) / 1000)


def test_the_cache_has_room_for_sequences_at_their_fullest() -> None:
    assert Lengths((1000.0,)).held(100) == 1100
    assert Lengths((1.0,) * 9 + (1000.0,)).held(0) == pytest.approx(100_000.9 / (2 * 100.9)), "those that run are long"
    assert Lengths((10.0, 20.0)).held(100) == pytest.approx(110), "at their end none is short any more"


def test_a_pipeline_takes_a_while_from_stage_to_stage() -> None:
    model, load, work = passes(), a_step(), Work(trained=24, updates=2)
    slow = replace(model, software=replace(WHOLE, efficiency=replace(IDEAL, stage_seconds=0.5)))
    none, some = (training.training_seconds(each, work, load, layout(4), np.array(2.0)) for each in (model, slow))
    assert some - none == pytest.approx(2 * (6 + 4 - 1) * 2 * 0.5), "there and back, in 2 updates of 6 micro-batches"


def test_an_optimizer_in_the_host_costs_the_way_there_and_back() -> None:
    """In bytes of a parameter: two gathers, the gradient, and Adam on the host; a transition brings the weights."""
    model = passes(software=SHARDED, host_bandwidth=1e9)
    work, load = Work(trained=8, updates=1, steps_in_host=True), a_step()
    gigabytes = SMALL.parameters / 2 / 1e9
    trained = training.training_seconds(model, work, load, layout(d=2), np.array(4.0))
    assert trained == pytest.approx((4 + 4 + 4 + 34) * gigabytes)
    assert training.training_seconds(model, replace(work, steps_in_host=False), load, layout(d=2), np.array(4.0)) < 1e-9
    brought = generation.transition_seconds(model, work, layout(d=2), layout())
    assert brought == pytest.approx(4 * gigabytes)


SKEWED = Workload(sequences=8, prompt=Lengths((8.0,)), response=Lengths((*7 * (8.0,), 64.0)), work={})
"""Eight responses to prompts of 8 tokens: seven of 8 tokens, one of 64."""


def left_to_score(generation: float, scoring: float, load: Workload) -> float:
    """Seconds of scoring in another pool that are left when generation has ended."""
    streams = groups_of(replace(load, streams=True))
    return float(Objective(streams=streams).three(np.array([generation, 0.0, scoring, 0.0]))[1])


def step_of(pools: Sequence[NDArray[np.float64]], load: Workload) -> float:
    goal = Objective(streams=groups_of(load), works_ahead=load.works_ahead)
    return float(goal.step(np.max([stages_of(each, load, generates=each[0] > 0) for each in pools], axis=0)))


@pytest.mark.parametrize(
    ("generation", "scoring", "left"),
    [
        (8.0, 4.6, 1.8),  # 7 x 16 of 184 tokens are scored after an eighth of generation; 72 are left
        (0.0, 4.6, 4.6),
        (1.0, 46.0, 46.0 - 7 / 8),  # there is no time to score more
    ],
)
def test_what_is_left_to_score_when_the_longest_response_ends(generation: float, scoring: float, left: float) -> None:
    assert left_to_score(generation, scoring, SKEWED) == pytest.approx(left)


def test_without_a_longest_response_nothing_is_saved() -> None:
    load = replace(SKEWED, response=Lengths((16.0,)))
    assert left_to_score(3.0, 2.0, load) == pytest.approx(2.0)


def test_only_what_is_scored_in_another_pool_begins_early() -> None:
    pools = [np.array([7.0, 1.0, 2.0, 1.0]), np.array([0.0, 4.6, 3.0, 0.0])]
    assert step_of(pools, SKEWED) == 8.0 + 4.6 + 3.0
    assert step_of(pools, replace(SKEWED, streams=True)) == pytest.approx(8.0 + 1.8 + 3.0)
    pools[0][1] = 2.5  # the pool that generates scores, too, and only afterwards
    assert step_of(pools, replace(SKEWED, streams=True)) == pytest.approx(8.0 + 2.5 + 3.0)


@pytest.mark.parametrize(("generation", "step"), [(7.0, 1.0 + 4.6 + 3.0), (9.0, 1.0 + 9.0)])
def test_weights_are_sent_while_neither_pool_works(generation: float, step: float) -> None:
    pools = [np.array([generation, 0.0, 0.0, 1.0]), np.array([0.0, 4.6, 3.0, 0.0])]
    assert step_of(pools, replace(SKEWED, streams=True, works_ahead=True)) == pytest.approx(step)
