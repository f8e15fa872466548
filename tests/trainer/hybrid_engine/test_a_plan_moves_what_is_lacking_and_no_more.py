"""The counts of a plan are the paper's (Table 2), and every needed element comes exactly once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.hybrid_engine.layout import Parameter, describe, generation_shards
from rlhf_trainer.hybrid_engine.reshard_plan import Move, Parties, ReshardPlan, plan
from rlhf_trainer.tensor_slice import TensorSlice
from tests.each import each_case
from tests.trainer.hybrid_engine.baselines import Mode, entering, exchanged, plans_of, received, sent, transition
from tests.trainer.hybrid_engine.families import config

UNTIED = describe(config("qwen3", tied=False))
TIED = describe(config("qwen2", tied=True))
ODD = describe(config("qwen2", tied=False, vocabulary=250, num_key_value_heads=1, intermediate_size=56))


def layout(p: int, t: int, d: int, p_g: int, t_g: int) -> ParallelSizes:
    """Weights are replicated over the data-parallel ranks."""
    return ParallelSizes(data=d, pipeline=p, tensor=t, replicas=d, generation_pipeline=p_g, generation_tensor=t_g)


def colocated(model: list[Parameter], sizes: ParallelSizes, *, shards: int = 1) -> Sequence[ReshardPlan]:
    return transition("HybridFlow", model, sizes, shards=shards).plans


def gets(made: ReshardPlan) -> list[tuple[str, Move]]:
    """All that a rank takes from itself and from others."""
    moves = (
        (name, [*each.across, *each.within, *([each.own] if each.own else [])]) for name, each in made.moves.items()
    )
    return [(name, move) for name, each in moves for move in each if move.destination == made.rank]


def received_of(made: ReshardPlan, is_counted: Callable[[str], bool]) -> int:
    return sum(move.slice.numel for name, move in gets(made) if not move.is_own and is_counted(name))


def trading(plans: Sequence[ReshardPlan]) -> list[list[int]]:
    """The smallest sets of ranks that exchange among themselves only."""
    group_of: dict[int, set[int]] = {}
    for move in (move for made in plans for move in exchanged(made)):
        merged = group_of.get(move.source, {move.source}) | group_of.get(move.destination, {move.destination})
        group_of.update(dict.fromkeys(merged, merged))
    return sorted(map(list, {tuple(sorted(group)) for group in group_of.values()}))


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


@each_case("sizes", SIZES, ids=str)
def test_replicated_weights_cost_what_the_paper_says(sizes: ParallelSizes) -> None:
    """(tp - t_g p_g) / (t_g p_g t p) of the sharded parameters, on every rank."""
    made, weights = colocated(UNTIED, sizes), sharded_layers(UNTIED)
    cells, kept = sizes.tensor * sizes.pipeline, sizes.generation_tensor * sizes.generation_pipeline
    expected = Fraction(cells - kept, kept * cells) * sum(weights.values())
    assert {received_of(each, weights.__contains__) for each in made} == {expected}


def test_without_stages_embedding_and_head_count_too() -> None:
    sizes = layout(1, 4, 2, 1, 2)
    total = sum(TensorSlice.whole(parameter.shape).numel for parameter in UNTIED if parameter.tensor_dim is not None)
    assert {received(made) for made in colocated(UNTIED, sizes)} == {total // 4}


def test_with_stages_other_stages_ends_are_counted_apart() -> None:
    """2-4-1 to 1-2: a rank of the last stage lacks the norms of two layers and half of the embedding."""
    sizes = layout(2, 4, 1, 1, 2)
    made, weights = colocated(UNTIED, sizes), sharded_layers(UNTIED)
    norms = 2 * (32 + 32 + 4 + 4)
    apart = [received_of(each, lambda name: name not in weights) for each in made]
    assert apart[:4] == [norms + 32 + 256 * 32 // 2 + 256 * 32 // 4] * 4  # and the final norm, the head
    assert apart[4:] == [norms + 256 * 32 // 2 + 256 * 32 // 4] * 4


@pytest.mark.parametrize("sizes", [*SIZES[:-1], pytest.param(SIZES[-1], marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("model", [UNTIED, TIED, ODD], ids=["untied", "tied", "odd sizes"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_receives_its_shard_but_for_what_it_holds(
    sizes: ParallelSizes, model: list[Parameter], sharded: bool
) -> None:
    plans = colocated(model, sizes, shards=sizes.data if sharded else 1)
    for made in plans:
        lacking = 0
        for name, part in made.wanted.items():
            own = made.held[name].intersection(part) if name in made.held else None
            lacking += part.numel - (own.numel if own else 0)
        assert received(made) == lacking
    assert_every_element_comes_once(model, plans)


def assert_every_element_comes_once(model: list[Parameter], plans: Sequence[ReshardPlan]) -> None:
    """What a rank gets covers what it shall hold without overlap, and both sides of a move know of it.

    A source holds what it sends, or got it from another node before.
    """
    shapes = {parameter.name: parameter.shape for parameter in model}
    for made in plans:
        counts = {name: torch.zeros(shapes[name], dtype=torch.int8) for name in made.wanted}
        for name, move in gets(made):
            counts[name][move.slice.within(TensorSlice.whole(shapes[name]))] += 1
            its, source = plans[move.source].moves[name], plans[move.source].held.get(name)
            is_forwarded = any((each.slice, each.destination) == (move.slice, move.source) for each in its.across)
            assert is_forwarded or (source and source.intersection(move.slice) == move.slice)
            assert move.is_own or move in (its.within if move in made.moves[name].within else its.across)
        for name, count in counts.items():
            expected = torch.zeros_like(count)
            expected[made.wanted[name].within(TensorSlice.whole(shapes[name]))] = 1
            assert torch.equal(count, expected), f"{name} on rank {made.rank}"
    assert sum(sent(made) for made in plans) == sum(received(made) for made in plans)


def test_equal_layouts_move_nothing() -> None:
    for sizes in (layout(1, 2, 2, 1, 2), layout(2, 2, 2, 2, 2), layout(1, 1, 4, 1, 1)):
        for made in colocated(TIED, sizes):
            assert all(move.is_own for _, move in gets(made))
            assert {name for name, _ in gets(made)} == made.wanted.keys()


def test_the_bytes_of_a_rank_do_not_depend_on_the_replicas() -> None:
    found = []
    for d in (1, 2, 3, 4):
        made = colocated(TIED, layout(2, 2, d, 1, 1))
        per_replica = [tuple(received(made[4 * replica + rank]) for rank in range(4)) for replica in range(d)]
        assert len(set(per_replica)) == 1
        found.append(per_replica[0])
    assert len(set(found)) == 1


@each_case("sizes", SIZES[:4], ids=str)
def test_the_comparisons_receive_what_the_paper_says(sizes: ParallelSizes) -> None:
    """HybridFlow-V (tp - 1) / (tp) of the weights, DS-Chat (tpd - 1) / (tpd)."""
    weights = sharded_layers(UNTIED)
    total, cells = sum(weights.values()), sizes.tensor * sizes.pipeline
    modes: dict[Mode, int] = {"HybridFlow-V": cells, "DS-Chat": cells * sizes.data}
    for mode, parts in modes.items():
        made = transition(mode, UNTIED, sizes).plans
        expected = Fraction(parts - 1, parts) * total
        assert {received_of(each, weights.__contains__) for each in made} == {expected}


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        (layout(1, 4, 2, 1, 2), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (layout(2, 4, 1, 1, 2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (layout(2, 4, 1, 2, 2), [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
    ids=str,
)
def test_only_a_micro_data_parallel_group_trades(sizes: ParallelSizes, groups: list[list[int]]) -> None:
    assert trading(colocated(UNTIED, sizes)) == groups


def test_a_replica_of_shards_trades_inside_itself() -> None:
    """d = 4 as 2 replicas of 2 shards, t = 2, t_g = 1: the replicas are ranks 0-3 and 4-7."""
    assert trading(colocated(ODD, layout(1, 2, 4, 1, 1), shards=2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_many_hold_is_sent_by_all_of_them() -> None:
    """In a replica each rank sends what it receives, and equal sources send the same, also from node to node."""
    made = transition("HybridFlow-V", TIED, layout(1, 2, 2, 1, 1)).plans
    assert [sent(each) for each in made] == [received(each) for each in made]
    for per_node in (1, 16):
        pools = disjoint(TIED, ParallelSizes(data=4, replicas=4), ParallelSizes(data=4), per_node=per_node)
        assert len({sent(each) for each in pools[:4]}) == 1


def disjoint(
    model: list[Parameter], training: ParallelSizes, generation: ParallelSizes, *, per_node: int = 16
) -> list[ReshardPlan]:
    """The plans from one pool to another, whose ranks are numbered after those of the first."""
    first, stop = training.world_size, training.world_size + generation.world_size
    parties = Parties(
        training=training,
        sources=range(first),
        generation=generation,
        destinations=range(first, stop),
        nodes=[rank // per_node for rank in range(stop)],
    )
    return [plan(model, parties, rank) for rank in range(stop)]


@each_case("replicas", [1, 2])
@each_case("per_node", [4, 16])
@each_case(
    "generation", [ParallelSizes(data=1, tensor=4), ParallelSizes(data=3), ParallelSizes(data=1, pipeline=2, tensor=2)]
)
def test_generation_may_have_a_pool_of_its_own(generation: ParallelSizes, per_node: int, replicas: int) -> None:
    training = ParallelSizes(data=2, pipeline=2, tensor=2, replicas=replicas)
    plans = disjoint(ODD, training, generation, per_node=per_node)
    assert_every_element_comes_once(ODD, plans)
    for rank in range(generation.world_size):
        wanted = generation_shards(ODD, generation, rank)
        assert received(plans[8 + rank]) == sum(part.numel for part in wanted.values())
    assert not any(move.is_own for made in plans for _, move in gets(made))


def fsdp(sizes: ParallelSizes) -> ParallelSizes:
    return replace(sizes, replicas=1)


OVER_NODES = {
    "2-4-1 to 1-2, a stage on each of 2 nodes": (layout(2, 4, 1, 1, 2), 4),
    "2-4-2 to 1-1, 4 nodes": (layout(2, 4, 2, 1, 1), 4),
    "4-2-1 to 2-1, 4 nodes": (layout(4, 2, 1, 2, 1), 2),
    "FSDP over 4 nodes": (fsdp(layout(1, 1, 8, 1, 1)), 2),
    "FSDP of tensor-parallel shards, 1-4-2 to 1-2": (fsdp(layout(1, 4, 2, 1, 2)), 4),
    "FSDP of shards that lie on several nodes, 1-4-4 to 1-1": (fsdp(layout(1, 4, 4, 1, 1)), 2),
    "a stage is a rank, a node is half of a replica": (layout(4, 1, 2, 1, 1), 2),
}


@each_case("model", [UNTIED, TIED, ODD], ids=["untied", "tied", "odd sizes"])
@each_case(("sizes", "per_node"), OVER_NODES.values(), ids=OVER_NODES)
def test_each_byte_enters_a_node_once(model: list[Parameter], sizes: ParallelSizes, per_node: int) -> None:
    plans = plans_of(model, sizes, per_node=per_node)
    assert_every_element_comes_once(model, plans)
    counted = [entering(plans[first : first + per_node]) for first in range(0, len(plans), per_node)]
    assert sum(bound for _, bound in counted) > 0
    assert all(entered == bound for entered, bound in counted), counted


def test_the_ranks_of_a_node_share_what_enters_it() -> None:
    """FSDP over 2 nodes: each of 4 ranks gets a quarter of the other node's half, and the rest inside its node."""
    total = sum(TensorSlice.whole(parameter.shape).numel for parameter in TIED)
    for made in plans_of(TIED, ParallelSizes(data=8), per_node=4):
        entered = sum(move.slice.numel for each in made.moves.values() for move in each.across)
        assert entered == 2 * total // 8  # in and out
        assert received(made) == total * 7 // 8


def counted_slices(monkeypatch: pytest.MonkeyPatch, sizes: ParallelSizes) -> tuple[int, int]:
    """(slices that are made, moves of this rank) to plan for one rank of 8 on a node."""
    made, post_init = [], TensorSlice.__init__

    def counting(self: TensorSlice, *bounds: tuple[int, ...]) -> None:
        made.append(1)
        post_init(self, *bounds)

    with monkeypatch.context() as patch:
        patch.setattr(TensorSlice, "__init__", counting)
        nodes = [rank // 8 for rank in range(sizes.world_size)]
        own = plan(UNTIED, Parties.replica(sizes, nodes, 3), 3)
    return len(made), len(exchanged(own))


def test_what_a_rank_plans_does_not_grow_with_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank looks at its replica only."""
    few, many = (counted_slices(monkeypatch, layout(1, 4, d, 1, 2)) for d in (2, 256))
    assert few == many


def test_a_ranks_plan_grows_with_ranks_and_not_with_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP over 16 times as many ranks: by pairs it would be 256 times the work."""
    (few, _), (many, _) = (counted_slices(monkeypatch, ParallelSizes(data=d)) for d in (8, 128))
    assert many < 20 * few


def test_layers_that_are_cut_alike_are_planned_once() -> None:
    made = plans_of(UNTIED, layout(1, 4, 2, 1, 2))[0].moves
    assert made["model.layers.0.mlp.up_proj.weight"] is made["model.layers.3.mlp.up_proj.weight"]
