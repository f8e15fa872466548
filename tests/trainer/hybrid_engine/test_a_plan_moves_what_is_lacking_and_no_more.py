"""The counts of a plan are the paper's (Table 2), and every needed element comes exactly once."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.hybrid_engine.layout import (
    Parameter,
    Shards,
    describe,
    generation_shards,
    training_shards,
)
from rlhf_trainer.hybrid_engine.reshard_plan import ReshardPlan, plan
from rlhf_trainer.tensor_slice import TensorSlice
from tests.trainer.hybrid_engine.baselines import Mode, transition
from tests.trainer.hybrid_engine.families import config

UNTIED = describe(config("qwen3", tied=False))
TIED = describe(config("qwen2", tied=True))
ODD = describe(config("qwen2", tied=False, vocabulary=250, num_key_value_heads=1, intermediate_size=56))


def layout(p: int, t: int, d: int, p_g: int, t_g: int) -> ParallelSizes:
    return ParallelSizes(data=d, pipeline=p, tensor=t, generation_pipeline=p_g, generation_tensor=t_g)


def colocated(model: list[Parameter], sizes: ParallelSizes, *, shards: int = 1) -> ReshardPlan:
    return transition("HybridFlow", model, sizes, shards=shards).plan


def received(made: ReshardPlan, rank: int, is_counted: Callable[[str], bool] = lambda name: True) -> int:
    return sum(
        move.slice.numel
        for move in made.moves
        if move.destination == rank and not move.is_own and is_counted(move.name)
    )


def sharded_layers(model: list[Parameter]) -> dict[str, int]:
    """Elements of the parameters that p stages and t ranks share equally."""
    return {
        parameter.name: TensorSlice.whole(parameter.shape).numel
        for parameter in model
        if isinstance(parameter.positions[0], int) and parameter.tensor_dim is not None
    }


SIZES = [
    layout(1, 4, 2, 1, 2),
    layout(2, 4, 1, 1, 2),
    layout(2, 4, 1, 2, 2),
    layout(4, 2, 1, 2, 1),
    layout(1, 2, 2, 1, 1),
    layout(4, 4, 2, 1, 1),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_replicated_weights_cost_what_the_paper_says(sizes: ParallelSizes) -> None:
    """(tp - t_g p_g) / (t_g p_g t p) of the sharded parameters, on every rank."""
    made, weights = colocated(UNTIED, sizes), sharded_layers(UNTIED)
    cells, kept = sizes.tensor * sizes.pipeline, sizes.generation_tensor * sizes.generation_pipeline
    expected = Fraction(cells - kept, kept * cells) * sum(weights.values())
    assert {received(made, rank, weights.__contains__) for rank in range(sizes.world_size)} == {expected}


def test_without_stages_that_holds_for_the_embedding_and_head_too_and_norms_cost_nothing() -> None:
    sizes = layout(1, 4, 2, 1, 2)
    total = sum(TensorSlice.whole(parameter.shape).numel for parameter in UNTIED if parameter.tensor_dim is not None)
    assert {colocated(UNTIED, sizes).received(rank) for rank in range(8)} == {total // 4}


def test_with_stages_the_norms_and_ends_of_other_stages_are_counted_apart() -> None:
    """2-4-1 to 1-2: a rank of the last stage lacks the norms of two layers and half of the embedding."""
    sizes = layout(2, 4, 1, 1, 2)
    made, weights = colocated(UNTIED, sizes), sharded_layers(UNTIED)
    norms = 2 * (32 + 32 + 4 + 4)
    apart = [received(made, rank, lambda name: name not in weights) for rank in range(8)]
    assert apart[:4] == [norms + 32 + 256 * 32 // 2 + 256 * 32 // 4] * 4  # and the final norm, the head
    assert apart[4:] == [norms + 256 * 32 // 2 + 256 * 32 // 4] * 4


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("model", [UNTIED, TIED, ODD], ids=["untied", "tied", "odd sizes"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_receives_its_generation_shard_but_for_what_it_holds(
    sizes: ParallelSizes, model: list[Parameter], sharded: bool
) -> None:
    made = colocated(model, sizes, shards=sizes.data if sharded else 1)
    for rank in range(sizes.world_size):
        lacking = 0
        for name, part in made.destinations[rank].items():
            own = made.sources[rank][name].intersection(part) if name in made.sources[rank] else None
            lacking += part.numel - (own.numel if own else 0)
        assert made.received(rank) == lacking
    assert_every_element_comes_once(model, made)


def assert_every_element_comes_once(model: list[Parameter], made: ReshardPlan) -> None:
    """The moves to a rank lie in what their source holds, and cover what the rank shall hold without overlap."""
    shapes = {parameter.name: parameter.shape for parameter in model}
    counts: dict[tuple[int, str], torch.Tensor] = {
        (rank, name): torch.zeros(shapes[name], dtype=torch.int8)
        for rank, slices in made.destinations.items()
        for name in slices
    }
    for move in made.moves:
        assert made.sources[move.source][move.name].intersection(move.slice) == move.slice
        counts[move.destination, move.name][move.slice.within(TensorSlice.whole(shapes[move.name]))] += 1
    for (rank, name), count in counts.items():
        expected = torch.zeros_like(count)
        expected[made.destinations[rank][name].within(TensorSlice.whole(shapes[name]))] = 1
        assert torch.equal(count, expected), f"{name} on rank {rank}"


def test_equal_layouts_move_nothing() -> None:
    for sizes in (layout(1, 2, 2, 1, 2), layout(2, 2, 2, 2, 2), layout(1, 1, 4, 1, 1)):
        made = colocated(TIED, sizes)
        assert made.moves
        assert all(move.is_own for move in made.moves)
        assert made.exchange_groups == []


def test_the_bytes_of_a_rank_do_not_depend_on_the_replicas() -> None:
    found = []
    for d in (1, 2, 3, 4):
        made = colocated(TIED, layout(2, 2, d, 1, 1))
        per_replica = [tuple(made.received(4 * replica + rank) for rank in range(4)) for replica in range(d)]
        assert len(set(per_replica)) == 1
        found.append(per_replica[0])
    assert len(set(found)) == 1


@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
def test_the_comparisons_receive_what_the_paper_says(sizes: ParallelSizes) -> None:
    """HybridFlow-V (tp - 1) / (tp) of the weights, DS-Chat (tpd - 1) / (tpd)."""
    weights = sharded_layers(UNTIED)
    total, cells = sum(weights.values()), sizes.tensor * sizes.pipeline
    modes: dict[Mode, int] = {"HybridFlow-V": cells, "DS-Chat": cells * sizes.data}
    for mode, parts in modes.items():
        made = transition(mode, UNTIED, sizes).plan
        expected = Fraction(parts - 1, parts) * total
        assert {received(made, rank, weights.__contains__) for rank in range(sizes.world_size)} == {expected}


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        (layout(1, 4, 2, 1, 2), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (layout(2, 4, 1, 1, 2), [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (layout(2, 4, 1, 2, 2), [(0, 1), (2, 3), (4, 5), (6, 7)]),
    ],
    ids=str,
)
def test_only_a_micro_data_parallel_group_trades(sizes: ParallelSizes, groups: list[tuple[int, ...]]) -> None:
    assert colocated(UNTIED, sizes).exchange_groups == groups


def test_a_replica_of_shards_trades_inside_itself() -> None:
    """d = 4 as 2 replicas of 2 shards, t = 2, t_g = 1: the replicas are ranks 0-3 and 4-7."""
    assert colocated(ODD, layout(1, 2, 4, 1, 1), shards=2).exchange_groups == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_what_many_hold_is_sent_by_all_of_them() -> None:
    """In a replica each rank sends what it receives; 4 equal sources differ by one embedding at most."""
    made = transition("HybridFlow-V", TIED, layout(1, 2, 2, 1, 1)).plan
    assert [made.sent(rank) for rank in range(4)] == [made.received(rank) for rank in range(4)]
    pools = disjoint(TIED, ParallelSizes(data=4), ParallelSizes(data=4))
    sent = [pools.sent(rank) for rank in range(4)]
    assert max(sent) - min(sent) <= 256 * 32


def disjoint(
    model: list[Parameter], training: ParallelSizes, generation: ParallelSizes, *, shards: int = 1
) -> ReshardPlan:
    """A plan from one pool to another, whose ranks are numbered after those of the first."""
    first = training.world_size
    sources = dict(enumerate(training_shards(model, training, shards=shards)))
    return plan(sources, dict(enumerate(generation_shards(model, generation), first)))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "generation", [ParallelSizes(data=1, tensor=4), ParallelSizes(data=3), ParallelSizes(data=1, pipeline=2, tensor=2)]
)
def test_generation_may_have_a_pool_of_its_own(generation: ParallelSizes, shards: int) -> None:
    made = disjoint(ODD, ParallelSizes(data=2, pipeline=2, tensor=2), generation, shards=shards)
    assert_every_element_comes_once(ODD, made)
    for rank, slices in enumerate(generation_shards(ODD, generation), 8):
        assert made.received(rank) == sum(part.numel for part in slices.values())
    assert not any(move.is_own for move in made.moves)


def slices(*bounds: tuple[int, int]) -> dict[int, Shards]:
    return {rank: {"weight": TensorSlice((start,), (stop,))} for rank, (start, stop) in enumerate(bounds)}


def test_what_nobody_holds_and_what_overlaps_is_refused() -> None:
    with pytest.raises(ValueError, match="weight: rank 0 needs 4 elements, and the sources hold 3"):
        plan(slices((0, 2), (2, 3)), slices((0, 4)))
    with pytest.raises(ValueError, match="weight: the sources hold slices that overlap"):
        plan(slices((0, 2), (1, 3)), slices((0, 3)))


def test_of_two_sources_the_nearer_gives() -> None:
    near: dict[int, tuple[int, ...]] = {0: (0, 0), 1: (1, 0), 2: (1, 1), 3: (1, 1)}
    source = {rank: {"weight": TensorSlice((0,), (2,))} for rank in (0, 1, 2)}
    made: Shards = {"weight": TensorSlice((0,), (2,))}
    assert [move.source for move in plan(source, {3: made}, near).moves] == [2]
    assert [move.source for move in plan({0: made, 1: made}, {3: made}, near).moves] == [1]
