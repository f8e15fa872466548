"""The exchange brings every rank its generation shard, in as many bytes as planned, and says when one bit is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import NumericsError
from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.hybrid_engine.buckets import Step, loads, steps
from rlhf_trainer.hybrid_engine.exchange import Exchange, ReshardStats
from rlhf_trainer.hybrid_engine.hybrid_engine import BUCKET_BYTES
from rlhf_trainer.hybrid_engine.layout import Parameter, describe
from rlhf_trainer.hybrid_engine.reshard_plan import Parties, ReshardPlan, plan
from rlhf_trainer.tensor_slice import TensorSlice
from tests.trainer.hybrid_engine.baselines import MODES, Mode, assembled, plans_of, received, sent, transition
from tests.trainer.hybrid_engine.families import config
from tests.trainer.ranks import run_kept_ranks, run_ranks

UNTIED = describe(config("qwen3", tied=False))
TIED = describe(config("qwen2", tied=True))
ODD = describe(config("qwen2", tied=False, vocabulary=250, num_key_value_heads=1, intermediate_size=56))

FEW_WORDS = describe(config("llama", tied=True, vocabulary=70))
FOUR_EXPERTS = describe(config("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24))
EXPERTS = describe(config("qwen3_moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24))


def layout(p: int, t: int, d: int, p_g: int, t_g: int) -> ParallelSizes:
    """Weights are replicated over the data-parallel ranks."""
    return ParallelSizes(data=d, pipeline=p, tensor=t, replicas=d, generation_pipeline=p_g, generation_tensor=t_g)


Plans = Sequence[ReshardPlan]
"""Of each rank."""


def exchange_of(plans: Plans, dtype: torch.dtype, bucket_bytes: int) -> Exchange:
    """This rank's, with buckets of one size."""
    own, sizes = plans[dist.get_rank()], (bucket_bytes, bucket_bytes)
    return Exchange(own, dtype=dtype, bucket_bytes=sizes, device=torch.device("cpu"))


def full_weights(model: list[Parameter]) -> dict[str, Tensor]:
    """The whole float32 model, the same on every rank."""
    torch.manual_seed(1)
    return {parameter.name: torch.randn(parameter.shape) for parameter in model}


def cut(full: dict[str, Tensor], slices: dict[str, TensorSlice]) -> dict[str, Tensor]:
    """The parts of a model in these slices."""
    return {name: full[name][part.within(TensorSlice.whole(full[name].shape))].clone() for name, part in slices.items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def moved(model: list[Parameter], plans: Plans, dtype: torch.dtype, bucket_bytes: int) -> tuple[ReshardStats, int, int]:
    """Two updates on this rank, both checked: what the second counted, and the elements the plan sends and receives."""
    own, full = plans[dist.get_rank()], full_weights(model)
    held = cut(full, own.held)
    before = {name: tensor.clone() for name, tensor in held.items()}
    exchange = exchange_of(plans, dtype, bucket_bytes)
    for _ in range(2):
        found = assembled(exchange.pieces(held), own.wanted, torch.empty(0, dtype=dtype))
        assert same_bits(found, {name: tensor.to(dtype) for name, tensor in cut(full, own.wanted).items()})
        exchange.verify({name: bit_sum(tensor) for name, tensor in found.items()})
        assert same_bits(held, before)
    return exchange.stats, sent(own), received(own)


CASES: dict[str, tuple[list[Parameter], ParallelSizes, int, int]] = {
    "1-1-2 sharded": (TIED, layout(1, 1, 2, 1, 1), 2, 8),
    "1-1-2 sharded, three experts": (EXPERTS, layout(1, 1, 2, 1, 1), 2, 8),
    "1-1-4, four experts over 2 ranks in 2 shards": (FOUR_EXPERTS, replace(layout(1, 1, 4, 1, 1), expert=2), 4, 8),
    "1-2-2 to 1-2, an expert on each rank": (FOUR_EXPERTS, replace(layout(1, 2, 2, 1, 2), expert=4), 2, 8),
    "1-2-4 to 1-2, an expert cut over 2 ranks": (FOUR_EXPERTS, replace(layout(1, 2, 4, 1, 2), expert=4), 4, 2),
    "1-1-6 sharded, an expert on every two ranks": (EXPERTS, replace(layout(1, 1, 6, 1, 1), expert=3), 6, 3),
    "1-2-1 to 1-1": (ODD, layout(1, 2, 1, 1, 1), 1, 8),
    "1-4-1 to 1-2": (UNTIED, layout(1, 4, 1, 1, 2), 1, 8),
    "1-4-1 with a rank whose words are all padding": (FEW_WORDS, layout(1, 4, 1, 1, 4), 1, 8),
    "2-2-1 to 1-1": (TIED, layout(2, 2, 1, 1, 1), 1, 8),
    "1-2-2 sharded to 1-1": (ODD, layout(1, 2, 2, 1, 1), 2, 8),
    "1-4-2 to 1-2": (UNTIED, layout(1, 4, 2, 1, 2), 1, 8),
    "2-2-2 sharded to 1-2": (ODD, layout(2, 2, 2, 1, 2), 2, 8),
    "2-1-4 in 2 replicas to 2-1": (TIED, layout(2, 1, 4, 2, 1), 2, 8),
    "2-4-1 to 1-2, a stage on each of 2 nodes": (UNTIED, layout(2, 4, 1, 1, 2), 1, 4),
    "1-2-4 sharded to 1-1, over 4 nodes": (ODD, layout(1, 2, 4, 1, 1), 4, 2),
    "4-1-2 to 2-1, over 4 nodes": (TIED, layout(4, 1, 2, 2, 1), 1, 1),
}


SLOW = (
    "1-2-4 sharded to 1-1, over 4 nodes",
    "1-2-4 to 1-2, an expert cut over 2 ranks",
    "1-1-6 sharded, an expert on every two ranks",
    "2-4-1 to 1-2, a stage on each of 2 nodes",
)
"""Others go over four nodes, have shards on two, or cut experts."""


@pytest.mark.parametrize(
    ("model", "sizes", "shards", "per_node"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, case in CASES.items()],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_a_rank_gets_its_shard_in_the_bytes_of_the_plan(
    model: list[Parameter], sizes: ParallelSizes, shards: int, per_node: int, dtype: torch.dtype
) -> None:
    plans = transition("HybridFlow", model, sizes, shards=shards, per_node=per_node).plans
    for traffic, gone, come in run_kept_ranks(sizes.world_size, moved, model, plans, dtype, 2730):
        assert (traffic.sent, traffic.received) == (gone * dtype.itemsize, come * dtype.itemsize)
        assert traffic.collectives >= 2


def every_layout(world: int) -> list[tuple[ParallelSizes, int]]:
    """All sizes of training and generation on so many ranks, with every number of FSDP shards."""
    sizes = (1, 2, 4, 8)
    return [
        (layout(p, t, world // (p * t), p_g, t_g), shards)
        for p, t, p_g, t_g, shards in product((1, 2, 4), sizes, sizes, sizes, sizes)
        if world % (p * t) == 0 and p % p_g == 0 and t % t_g == 0 and (world // (p * t)) % shards == 0
    ]


def moved_in_every_layout(model: list[Parameter], world: int) -> int:
    """Every layout in turn: how many there were."""
    for sizes, shards in every_layout(world):
        for per_node in (world // 2, world):
            plans = transition("HybridFlow", model, sizes, shards=shards, per_node=per_node).plans
            traffic, sent, received = moved(model, plans, torch.bfloat16, 2730)
            assert (traffic.sent, traffic.received) == (2 * sent, 2 * received), f"{sizes}, {shards} shards"
    return len(every_layout(world))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", [UNTIED, TIED, ODD], ids=["untied", "tied", "odd sizes"])
def test_every_layout(model: list[Parameter], world: int) -> None:
    assert run_ranks(world, moved_in_every_layout, model, world) == [{2: 6, 4: 21, 8: 52}[world]] * world


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_side_by_side(mode: Mode) -> None:
    """1-4-2 to 1-2: each rank receives 1/4, 3/4 or 7/8 of the sharded weights, and DS-Chat's half of the norms."""
    whole = {parameter.name: TensorSlice.whole(parameter.shape).numel for parameter in UNTIED}
    norms = sum(numel for name, numel in whole.items() if "norm" in name)
    weights = sum(whole.values()) - norms
    expected = {"HybridFlow": weights // 4, "HybridFlow-V": weights * 3 // 4, "DS-Chat": weights * 7 // 8 + norms // 2}
    plans = transition(mode, UNTIED, layout(1, 4, 2, 1, 2)).plans
    traffic = [counted for counted, _, _ in run_kept_ranks(8, moved, UNTIED, plans, torch.bfloat16, 1 << 20)]
    assert {counted.received for counted in traffic} == {2 * expected[mode]}


def test_equal_layouts_call_no_collective() -> None:
    plans = plans_of(TIED, layout(2, 2, 1, 2, 2))
    for traffic, _, _ in run_kept_ranks(4, moved, TIED, plans, torch.float32, 8192):
        assert traffic == ReshardStats()


@pytest.mark.parametrize("replicas", [1, 2])
def test_weights_reach_a_pool_that_does_not_train(replicas: int) -> None:
    """Ranks 0-3 train as 1-2-2 on one node, ranks 4-5 generate with t_g = 2 on another; nobody does both."""
    parties = Parties(
        training=ParallelSizes(data=2, tensor=2, replicas=replicas),
        sources=range(4),
        generation=ParallelSizes(data=1, tensor=2),
        destinations=range(4, 6),
        nodes=[0, 0, 0, 0, 1, 1],
    )
    plans = [plan(ODD, parties, rank) for rank in range(6)]
    traffic = [counted for counted, _, _ in run_kept_ranks(6, moved, ODD, plans, torch.bfloat16, 2730)]
    assert [counted.received for counted in traffic[:4]] == [0] * 4
    assert [counted.received for counted in traffic[4:]] == [
        2 * sum(part.numel for part in made.wanted.values()) for made in plans[4:]
    ]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest tensor that any operation makes or looks at, the bytes of all that were made, and values read."""

    largest = new = reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            self.new += made.nbytes
        self.reads += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return made


def allocated(
    model: list[Parameter], plans: Plans, dtype: torch.dtype, bucket_bytes: int
) -> tuple[int, int, ReshardStats]:
    """What the exchange allocates in an update: the largest tensor, all tensors together, and what it counts itself."""
    held = cut(full_weights(model), plans[dist.get_rank()].held)
    exchange = exchange_of(plans, dtype, bucket_bytes)
    with Operations() as operations:  # type: ignore[no-untyped-call]
        for _ in exchange.pieces(held):
            pass
    return operations.largest, operations.new, exchange.stats


def test_no_rank_makes_a_tensor_larger_than_its_shards() -> None:
    """2-2-2 sharded to 1-2: the whole embedding has 16 KB in bfloat16; a rank generates with half of it."""
    plans = plans_of(UNTIED, replace(layout(2, 2, 2, 1, 2), replicas=1))
    for largest, new, traffic in run_kept_ranks(8, allocated, UNTIED, plans, torch.bfloat16, 4096):
        assert largest <= 8192  # what it trains of the embedding, 64 rows of 32 in float32
        assert 8192 < new == traffic.buffers <= 12288 + 128  # parts end with a row


def test_over_nodes_there_are_three_buffers() -> None:
    plans = plans_of(UNTIED, replace(layout(2, 2, 2, 1, 2), replicas=1), per_node=4)
    for _, new, traffic in run_kept_ranks(8, allocated, UNTIED, plans, torch.bfloat16, 4096):
        assert 2 * (4096 + 64) + 2048 < new == traffic.buffers <= 16384 + 192


def test_what_a_rank_has_already_is_cast_in_parts_too() -> None:
    """No rank trades, and each casts the whole embedding."""
    plans = plans_of(UNTIED, layout(1, 1, 2, 1, 1))
    for _, new, traffic in run_kept_ranks(2, allocated, UNTIED, plans, torch.bfloat16, 4096):
        assert new == traffic.buffers == 4096
        assert traffic.collectives == 0


def test_smaller_buckets_take_more_collectives_and_less_memory() -> None:
    """The parameters of all layers, the embedding and the head lie in one bucket if they fit."""
    plans = plans_of(UNTIED, layout(1, 4, 1, 1, 2))
    (*_, small), *_ = run_kept_ranks(4, allocated, UNTIED, plans, torch.float32, 4096)
    (*_, large), *_ = run_kept_ranks(4, allocated, UNTIED, plans, torch.float32, 1 << 20)
    assert small.received == large.received
    assert small.collectives > large.collectives == 1
    assert small.buffers < large.buffers


def values_read(model: list[Parameter], plans: Plans) -> int:
    """How often a reshard waits for a value of the device."""
    own = plans[dist.get_rank()]
    held = cut(full_weights(model), own.held)
    exchange = exchange_of(plans, torch.bfloat16, 4096)
    kept = {name: bit_sum(tensor.to(torch.bfloat16)) for name, tensor in cut(full_weights(model), own.wanted).items()}
    with Operations() as operations:  # type: ignore[no-untyped-call]
        for _ in exchange.pieces(held):
            pass
        exchange.verify(kept)
    return int(operations.reads)


def test_one_value_is_read_from_the_device_for_all_layers() -> None:
    plans = plans_of(UNTIED, replace(layout(1, 2, 2, 1, 1), replicas=1), per_node=2)
    assert run_kept_ranks(4, values_read, UNTIED, plans) == [1] * 4


def corrupted(model: list[Parameter], plans: Plans, corrupt_rank: int, what: str) -> str:
    """Flip one bit of what a rank sends in its fourth collective, or keeps: the sentence of the error on this rank."""
    own = plans[dist.get_rank()]
    held = cut(full_weights(model), own.held)
    exchange = exchange_of(plans, torch.bfloat16, 1 << 14)
    calls, real = [], dist.all_to_all_single

    def flipping(received: Tensor, sent: Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 4 and dist.get_rank() == corrupt_rank and what == "sent":
            sent[-1] ^= 1
        return real(received, sent, *rest, **options)

    setattr(dist, "all_to_all_single", flipping)  # noqa: B010 mypy takes no assignment to a function
    try:
        kept = assembled(exchange.pieces(held), own.wanted, torch.empty(0, dtype=torch.bfloat16))
        if dist.get_rank() == corrupt_rank and what == "kept":
            kept["model.norm.weight"].view(torch.int16)[5] ^= 1
        exchange.verify({name: bit_sum(tensor) for name, tensor in kept.items()})
    except NumericsError as error:
        return str(error)
    finally:
        setattr(dist, "all_to_all_single", real)  # noqa: B010
    return ""


def test_a_flipped_bit_is_named_on_all_ranks() -> None:
    """1-2-2 to 1-1: ranks 0 and 1 trade, and 2 and 3 do."""
    plans = plans_of(UNTIED, layout(1, 2, 2, 1, 1))
    sentence = "what rank 2 received of it is not what rank 3 sent (checksum)"
    (said,) = set(run_kept_ranks(4, corrupted, UNTIED, plans, 3, "sent"))
    name, _, rest = said.partition(": ")
    assert name in {parameter.name for parameter in UNTIED}
    assert rest == sentence


def test_a_bit_that_a_generator_loses_is_named_on_all_ranks() -> None:
    plans = plans_of(UNTIED, layout(1, 2, 2, 1, 1))
    sentence = "model.norm.weight: the generator of rank 3 keeps other bits than arrived (checksum)"
    assert run_kept_ranks(4, corrupted, UNTIED, plans, 3, "kept") == [sentence] * 4


def shape_of_another_layout(model: list[Parameter], plans: Plans) -> str:
    exchange = exchange_of(plans, torch.float32, 4096)
    with pytest.raises(AssertionError) as error:
        next(exchange.pieces(full_weights(model)))
    return str(error.value)


def test_weights_of_another_layout_are_refused() -> None:
    plans = plans_of(UNTIED, layout(1, 2, 1, 1, 1))
    sentences = run_kept_ranks(2, shape_of_another_layout, UNTIED, plans)
    assert "model.embed_tokens.weight: rank 1 holds (256, 32), not TensorSlice(starts=(128, 0)" in sentences[1]


def steps_of(plans: Plans, least: int, most: int) -> list[list[Step]]:
    """The steps of each rank."""
    of_all = torch.stack([loads(made) for made in plans])
    return [steps(made, of_all, (least, most)) for made in plans]


def test_all_ranks_cut_alike_and_what_one_sends_another_expects() -> None:
    for per_node in (2, 4):
        found = steps_of(plans_of(UNTIED, layout(2, 2, 1, 1, 1), per_node=per_node), 700, 700)
        assert len({len(each) for each in found}) == 1
        for step in zip(*found, strict=True):
            assert len({each.is_exchanged for each in step}) == 1
            for source, destination in product(range(4), repeat=2):
                sent = [part for part in step[source].sends if part[1].destination == destination]
                assert sent == [part for part in step[destination].receives if part[1].source == source]


def test_stages_send_by_turns() -> None:
    """2-1-1 to 1-1: in each step but those of the ends both ranks send."""
    found = steps_of(plans_of(UNTIED, layout(2, 1, 1, 1, 1)), 4000, 4000)
    assert len(found[0]) > 8
    assert all(step.sends and step.receives for step in found[0][1:-1])


def test_no_rank_sends_and_gets_more_in_a_step_than_the_limit() -> None:
    """The embedding is larger, so it comes in parts. Over nodes a step forwards what came in the one before."""
    plans = [plans_of(UNTIED, replace(layout(2, 2, 2, 1, 2), replicas=1), per_node=per_node) for per_node in (2, 8)]
    for found in chain.from_iterable(steps_of(made, 2048, 2048) for made in plans):
        assert 1024 < max(step.numel for step in found) <= 2048 + 64  # parts end with a row
        assert sum(any("embed_tokens" in name for name, _ in step.needed) for step in found) > 1


QWEN_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


@pytest.mark.parametrize("per_node", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_reshard_of_7b_takes_64_collectives_at_most(per_node: int) -> None:
    """8 ranks on two nodes or on one; the last two collectives compare checksums."""
    model = describe(config("qwen2", tied=False, vocabulary=152064, **QWEN_7B))
    least, most = (size // 2 for size in BUCKET_BYTES)  # elements of bfloat16
    layouts = [layout(1, 4, 2, 1, 2), layout(2, 4, 1, 1, 2), layout(4, 2, 1, 1, 1), ParallelSizes(data=8)]
    for sizes in layouts:
        found = steps_of(plans_of(model, sizes, per_node=per_node), least, most)
        collectives = sum(step.is_exchanged for step in found[0])
        assert (0 if sizes.replicas == 2 else 48) <= collectives <= 62, f"{sizes!r}, {per_node} ranks a node"
        assert max(step.numel for each in found for step in each) <= most
