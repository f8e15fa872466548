"""The exchange brings every rank its generation shard, in as many bytes as planned, and says when one bit is wrong."""

from __future__ import annotations

from itertools import chain, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import NumericsError
from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.hybrid_engine.exchange import Exchange, ReshardStats, buckets
from rlhf_trainer.hybrid_engine.layout import Parameter, describe, generation_shards, training_shards
from rlhf_trainer.hybrid_engine.reshard_plan import plan
from rlhf_trainer.tensor_slice import TensorSlice
from tests.trainer.hybrid_engine.baselines import MODES, Mode, Transition, assembled, transition
from tests.trainer.hybrid_engine.families import config
from tests.trainer.ranks import run_ranks

UNTIED = describe(config("qwen3", tied=False))
TIED = describe(config("qwen2", tied=True))
ODD = describe(config("qwen2", tied=False, vocabulary=250, num_key_value_heads=1, intermediate_size=56))

FEW_WORDS = describe(config("llama", tied=True, vocabulary=70))


def layout(p: int, t: int, d: int, p_g: int, t_g: int) -> ParallelSizes:
    return ParallelSizes(data=d, pipeline=p, tensor=t, generation_pipeline=p_g, generation_tensor=t_g)


def full_weights(model: list[Parameter]) -> dict[str, Tensor]:
    """The whole float32 model, the same on every rank."""
    torch.manual_seed(1)
    return {parameter.name: torch.randn(parameter.shape) for parameter in model}


def cut(full: dict[str, Tensor], slices: dict[str, TensorSlice]) -> dict[str, Tensor]:
    """The parts of a model in these slices."""
    return {name: full[name][part.within(TensorSlice.whole(full[name].shape))].clone() for name, part in slices.items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def moved(
    model: list[Parameter], way: Transition, dtype: torch.dtype, buffer_bytes: int
) -> tuple[ReshardStats, int, int]:
    """Two updates on this rank, both checked: what the second counted, and the elements the plan sends and receives."""
    rank, full = dist.get_rank(), full_weights(model)
    held = cut(full, way.plan.sources.get(rank, {}))
    before = {name: tensor.clone() for name, tensor in held.items()}
    wanted = way.plan.destinations.get(rank, {})
    exchange = Exchange(way.plan, model, dtype=dtype, buffer_bytes=buffer_bytes, device=torch.device("cpu"))
    for _ in range(2):
        found = assembled(exchange.pieces(held), wanted, torch.empty(0, dtype=dtype))
        assert same_bits(found, {name: tensor.to(dtype) for name, tensor in cut(full, wanted).items()})
        assert exchange.checksums == {name: bit_sum(tensor) for name, tensor in found.items()}
        assert same_bits(held, before)
    return exchange.stats, way.plan.sent(rank), way.plan.received(rank)


CASES: dict[str, tuple[list[Parameter], ParallelSizes, int]] = {
    "1-1-2 sharded": (TIED, layout(1, 1, 2, 1, 1), 2),
    "1-2-1 to 1-1": (ODD, layout(1, 2, 1, 1, 1), 1),
    "1-4-1 to 1-2": (UNTIED, layout(1, 4, 1, 1, 2), 1),
    "1-4-1 with a rank whose words are all padding": (FEW_WORDS, layout(1, 4, 1, 1, 4), 1),
    "2-2-1 to 1-1": (TIED, layout(2, 2, 1, 1, 1), 1),
    "1-2-2 sharded to 1-1": (ODD, layout(1, 2, 2, 1, 1), 2),
    "1-4-2 to 1-2": (UNTIED, layout(1, 4, 2, 1, 2), 1),
    "2-2-2 sharded to 1-2": (ODD, layout(2, 2, 2, 1, 2), 2),
    "2-1-4 in 2 replicas to 2-1": (TIED, layout(2, 1, 4, 2, 1), 2),
}


@pytest.mark.parametrize(("model", "sizes", "shards"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_rank_gets_its_generation_shard_in_the_bytes_of_the_plan(
    model: list[Parameter], sizes: ParallelSizes, shards: int, dtype: torch.dtype
) -> None:
    way = transition("HybridFlow", model, sizes, shards=shards)
    for traffic, sent, received in run_ranks(sizes.world_size, moved, model, way, dtype, 8192):
        assert (traffic.sent, traffic.received) == (sent * dtype.itemsize, received * dtype.itemsize)
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
        way = transition("HybridFlow", model, sizes, shards=shards)
        traffic, sent, received = moved(model, way, torch.bfloat16, 8192)
        assert (traffic.sent, traffic.received) == (2 * sent, 2 * received), f"{sizes}, {shards} shards"
    return len(every_layout(world))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
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
    way = transition(mode, UNTIED, layout(1, 4, 2, 1, 2))
    traffic = [counted for counted, _, _ in run_ranks(8, moved, UNTIED, way, torch.bfloat16, 1 << 20)]
    assert {counted.received for counted in traffic} == {2 * expected[mode]}


def test_equal_layouts_call_no_collective() -> None:
    way = transition("HybridFlow", TIED, layout(2, 2, 1, 2, 2))
    for traffic, _, _ in run_ranks(4, moved, TIED, way, torch.float32, 8192):
        assert traffic == ReshardStats()


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_reach_a_pool_that_does_not_train(shards: int) -> None:
    """Ranks 0-3 train as 1-2-2, ranks 4-5 generate with t_g = 2; nobody does both."""
    sources = dict(enumerate(training_shards(ODD, ParallelSizes(data=2, tensor=2), shards=shards)))
    kept = generation_shards(ODD, ParallelSizes(data=1, tensor=2))
    way = Transition(plan(sources, dict(enumerate(kept, 4))), kept)
    traffic = [counted for counted, _, _ in run_ranks(6, moved, ODD, way, torch.bfloat16, 8192)]
    assert [counted.received for counted in traffic[:4]] == [0] * 4
    assert [counted.received for counted in traffic[4:]] == [
        2 * sum(part.numel for part in slices.values()) for slices in kept
    ]


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest tensor that any operation makes or looks at, and the bytes of all that were made."""

    largest = new = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            self.new += made.nbytes
        return made


def allocated(
    model: list[Parameter], way: Transition, dtype: torch.dtype, buffer_bytes: int
) -> tuple[int, int, ReshardStats]:
    """What the exchange allocates in an update: the largest tensor, all tensors together, and what it counts itself."""
    held = cut(full_weights(model), way.plan.sources[dist.get_rank()])
    exchange = Exchange(way.plan, model, dtype=dtype, buffer_bytes=buffer_bytes, device=torch.device("cpu"))
    with Allocations() as allocations:  # type: ignore[no-untyped-call]
        for _ in exchange.pieces(held):
            pass
    return allocations.largest, allocations.new, exchange.stats


def test_no_rank_makes_a_tensor_that_is_larger_than_its_shards_or_its_buffers() -> None:
    """2-2-2 sharded to 1-2: the whole embedding has 16 KB in bfloat16; a rank generates with half of it."""
    way = transition("HybridFlow", UNTIED, layout(2, 2, 2, 1, 2), shards=2)
    for largest, new, traffic in run_ranks(8, allocated, UNTIED, way, torch.bfloat16, 12288):
        assert largest <= 8192  # what it trains of the embedding, 64 rows of 32 in float32
        assert 8192 < new == traffic.buffers <= 12288


def test_what_a_rank_has_already_is_cast_in_parts_too() -> None:
    """No rank trades, and each casts the whole embedding."""
    way = transition("HybridFlow", UNTIED, layout(1, 1, 2, 1, 1))
    for _, new, traffic in run_ranks(2, allocated, UNTIED, way, torch.bfloat16, 12288):
        assert new == traffic.buffers == 4096
        assert traffic.collectives == 0


def test_smaller_buffers_take_more_collectives_and_less_memory() -> None:
    way = transition("HybridFlow", UNTIED, layout(1, 4, 1, 1, 2))
    (*_, small), *_ = run_ranks(4, allocated, UNTIED, way, torch.float32, 12288)
    (*_, large), *_ = run_ranks(4, allocated, UNTIED, way, torch.float32, 1 << 20)
    assert small.received == large.received
    assert small.collectives > large.collectives == 4 + 2 + 1  # layers, both ends, the checksums
    assert small.buffers < large.buffers


def corrupted(model: list[Parameter], way: Transition, corrupt_rank: int) -> str:
    """Flip one bit of what a rank sends in its third collective: the sentence of the error on this rank."""
    held = cut(full_weights(model), way.plan.sources[dist.get_rank()])
    exchange = Exchange(way.plan, model, dtype=torch.bfloat16, buffer_bytes=3 << 14, device=torch.device("cpu"))
    calls, real = [], dist.all_to_all_single

    def flipping(received: Tensor, sent: Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3 and dist.get_rank() == corrupt_rank:
            sent[-1] ^= 1
        return real(received, sent, *rest, **options)

    setattr(dist, "all_to_all_single", flipping)  # noqa: B010 mypy takes no assignment to a function
    try:
        for _ in exchange.pieces(held):
            pass
    except NumericsError as error:
        return str(error)
    finally:
        setattr(dist, "all_to_all_single", real)  # noqa: B010
    return ""


def test_a_flipped_bit_is_named_with_its_parameter_and_ranks_on_all_that_trade() -> None:
    """1-2-2 to 1-1: ranks 0 and 1 trade, and 2 and 3 do."""
    way = transition("HybridFlow", UNTIED, layout(1, 2, 2, 1, 1))
    sentence = "model.layers.1.mlp.down_proj.weight: what rank 2 received of it is not what rank 3 sent (checksum)"
    assert run_ranks(4, corrupted, UNTIED, way, 3) == ["", "", sentence, sentence]


def shape_of_another_layout(model: list[Parameter], way: Transition) -> str:
    full = full_weights(model)
    exchange = Exchange(way.plan, model, dtype=torch.float32, buffer_bytes=4096, device=torch.device("cpu"))
    with pytest.raises(AssertionError) as error:
        next(exchange.pieces(full))
    return str(error.value)


def test_weights_of_another_layout_are_refused() -> None:
    way = transition("HybridFlow", UNTIED, layout(1, 2, 1, 1, 1))
    sentences = run_ranks(2, shape_of_another_layout, UNTIED, way)
    assert "model.embed_tokens.weight: rank 1 holds (256, 32), not TensorSlice(starts=(128, 0)" in sentences[1]


def test_buckets_end_with_their_layer_and_all_ranks_cut_them_alike() -> None:
    way = transition("HybridFlow", UNTIED, layout(2, 2, 1, 1, 1))
    found = [buckets(way.plan, UNTIED, rank, 2000) for rank in range(4)]
    assert all([bucket.exchanged for bucket in other] == [bucket.exchanged for bucket in found[0]] for other in found)
    names = [list(dict.fromkeys(move.name for move in bucket.needed)) for bucket in found[0]]
    assert list(dict.fromkeys(chain.from_iterable(names))) == [parameter.name for parameter in UNTIED]
    assert all(len({name.split(".")[2] for name in bucket}) == 1 for bucket in names if "layers" in bucket[0])
    assert max(map(len, names)) > 1


def test_no_rank_sends_and_gets_more_in_a_bucket_than_the_limit() -> None:
    """The embedding is larger, so it comes in parts."""
    way = transition("HybridFlow", UNTIED, layout(2, 2, 2, 1, 2), shards=2)
    for rank in range(8):
        found = buckets(way.plan, UNTIED, rank, 2048)
        loads = [sum(move.slice.numel for move in (*bucket.sends, *bucket.receives)) for bucket in found]
        assert 1024 < max(loads) <= 2048
        parts = [bucket for bucket in found if any("embed_tokens" in move.name for move in bucket.sends)]
        assert len(parts) > 1 or rank % 4 > 1
