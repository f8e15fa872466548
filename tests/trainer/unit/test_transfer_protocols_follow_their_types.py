"""HybridFlow's Table 3: for many layouts and batch sizes every row arrives and comes back once and in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.protocols import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    AxisPlacement,
    AxisPlacements,
    TransferProtocol,
    blocks,
    sbp_protocol,
)
from tests.each import each_case

ROWS = (0, 1, 2, 5, 7, 12, 64)
SPLITTING = (DP_PROTO, THREE_D_PROTO, THREE_D_ALL_MICRO_DP)
ALL = (*SPLITTING, ONE_TO_ALL, THREE_D_PP_ONLY, ALL_TO_ALL)


def layouts() -> Iterator[ParallelSizes]:
    """Every p, t in 1, 2, 4 and d in 1, 2, 3 with every p_g and t_g that divides."""
    for pipeline, tensor, data in product((1, 2, 4), (1, 2, 4), (1, 2, 3)):
        for stages, shards in product((1, 2, 4), (1, 2, 4)):
            if pipeline % stages == 0 and tensor % shards == 0:
                yield ParallelSizes(
                    data=data, pipeline=pipeline, tensor=tensor, generation_pipeline=stages, generation_tensor=shards
                )


LAYOUTS = list(layouts())


def came_back(protocol: TransferProtocol, layout: ParallelSizes, rows: int) -> list[int]:
    """The rows that a method which returns its input gives back."""
    shares = protocol.distribute(layout, rows)
    return [row for ranks in protocol.collect(layout) for row in shares[ranks[0]]]


@pytest.mark.parametrize("protocol", SPLITTING, ids=lambda protocol: protocol.name)
def test_what_is_split_comes_back_once_and_in_order(protocol: TransferProtocol) -> None:
    for layout, rows in product(LAYOUTS, ROWS):
        assert came_back(protocol, layout, rows) == list(range(rows)), (layout, rows)


@each_case("protocol", ALL, ids=lambda protocol: protocol.name)
def test_every_rank_gets_its_rows_in_nearly_equal_shares(protocol: TransferProtocol) -> None:
    for layout, rows in product(LAYOUTS, ROWS):
        shares = protocol.distribute(layout, rows)
        assert len(shares) == layout.world_size
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert all(0 <= share.start <= share.stop <= rows for share in shares)


def test_3d_proto_gives_a_replica_one_block() -> None:
    for layout in LAYOUTS:
        shares = THREE_D_PROTO.distribute(layout, 12)
        for rank, share in enumerate(shares):
            assert share == blocks(12, layout.data)[rank // (layout.pipeline * layout.tensor)]
        taken = [rank for (rank,) in THREE_D_PROTO.collect(layout)]
        assert len(taken) == layout.data
        for place, rank in enumerate(taken):
            where = layout.coordinates(rank)
            assert (where["data"], where["pipeline"], where["tensor"]) == (place, layout.pipeline - 1, 0)


def test_3d_all_micro_dp_gives_a_generation_replica_one_block() -> None:
    for layout in LAYOUTS:
        expected = blocks(24, layout.data * layout.micro)
        for rank, share in enumerate(THREE_D_ALL_MICRO_DP.distribute(layout, 24)):
            where = layout.coordinates(rank)
            assert share == expected[where["data"] * layout.micro + where["micro"]]
        assert len(THREE_D_ALL_MICRO_DP.collect(layout)) == layout.data * layout.micro


def test_3d_pp_only_returns_each_stage_of_the_first_replica_once() -> None:
    for layout in LAYOUTS:
        places = [layout.coordinates(rank) for (rank,) in THREE_D_PP_ONLY.collect(layout)]
        expected = [(stage, 0, 0) for stage in range(layout.pipeline)]
        assert [(where["pipeline"], where["tensor"], where["data"]) for where in places] == expected


@pytest.mark.parametrize("protocol", [ONE_TO_ALL, ALL_TO_ALL], ids=lambda protocol: protocol.name)
def test_to_all_sends_everything_and_gathers_from_every_rank(protocol: TransferProtocol) -> None:
    for layout in LAYOUTS:
        assert protocol.distribute(layout, 5) == [range(5)] * layout.world_size
        assert protocol.collect(layout) == [(rank,) for rank in range(layout.world_size)]
    assert ALL_TO_ALL.by_rank
    assert not ONE_TO_ALL.by_rank


def groups(layout: ParallelSizes, *same: str) -> list[list[int]]:
    """Ranks, counted from 1 as in the paper, that agree on these axes."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        where = {str(axis): place for axis, place in layout.coordinates(rank).items()}
        found.setdefault(tuple(where[axis] for axis in same), []).append(rank + 1)
    return sorted(found.values())


TENSOR_GROUP = ("data", "micro", "generation_pipeline")
MICRO_GROUP = ("data", "generation_pipeline", "generation_tensor")


@pytest.mark.parametrize(
    ("layout", "tensor_groups", "micro_groups"),
    [
        (
            ParallelSizes(data=2, tensor=4, generation_tensor=2),  # Figure 8
            [[1, 3], [2, 4], [5, 7], [6, 8]],
            [[1, 2], [3, 4], [5, 6], [7, 8]],
        ),
        (
            ParallelSizes(data=1, pipeline=2, tensor=4, generation_pipeline=1, generation_tensor=2),
            [[1, 3], [2, 4], [5, 7], [6, 8]],
            [[1, 2, 5, 6], [3, 4, 7, 8]],
        ),
        (ParallelSizes(data=2, tensor=2, generation_tensor=1), [[1], [2], [3], [4]], [[1, 2], [3, 4]]),  # Figure 7
    ],
)
def test_generation_groups_are_those_of_the_paper(
    layout: ParallelSizes, tensor_groups: list[list[int]], micro_groups: list[list[int]]
) -> None:
    assert groups(layout, *TENSOR_GROUP) == tensor_groups
    assert groups(layout, *MICRO_GROUP) == micro_groups


def test_each_view_tells_all_ranks_apart() -> None:
    for layout in LAYOUTS:
        assert len(groups(layout, "data", "pipeline", "tensor")) == layout.world_size
        assert len(groups(layout, "data", "micro", "generation_pipeline", "generation_tensor")) == layout.world_size
        assert {len(group) for group in groups(layout, *MICRO_GROUP)} == {layout.micro}


def test_a_layout_is_data_parallel_unless_it_says_otherwise() -> None:
    layout = ParallelSizes(data=4)
    assert (layout.world_size, layout.micro, layout.pipeline, layout.tensor) == (4, 1, 1, 1)
    shares = DP_PROTO.distribute(layout, 10)
    assert shares == [range(3), range(3, 6), range(6, 8), range(8, 10)]
    assert THREE_D_PROTO.distribute(layout, 10) == THREE_D_ALL_MICRO_DP.distribute(layout, 10) == shares


def test_generation_sizes_that_do_not_divide_are_refused() -> None:
    sizes = ParallelSizes(data=1, tensor=4, generation_tensor=3)
    with pytest.raises(ValueError, match="do not divide"):
        sizes.coordinates(0)
    with pytest.raises(ValueError, match="do not divide"):
        THREE_D_ALL_MICRO_DP.distribute(sizes, 4)


def test_replicas_that_do_not_divide_the_data_ranks_are_refused() -> None:
    assert ParallelSizes(data=4, replicas=2).shards == 2
    with pytest.raises(ValueError, match="do not divide"):
        _ = ParallelSizes(data=4, replicas=3).shards


def test_addends_of_the_same_rows_are_collected_together() -> None:
    """The output of a row-parallel layer before its all-reduce: P over the tensor ranks."""
    gives: AxisPlacements = {"data": AxisPlacement.SPLIT, "tensor": AxisPlacement.PARTIAL}
    partial_sums = sbp_protocol("partial", takes={"data": AxisPlacement.SPLIT}, gives=gives)
    assert partial_sums.collect(ParallelSizes(data=2, tensor=3)) == [(0, 1, 2), (3, 4, 5)]
