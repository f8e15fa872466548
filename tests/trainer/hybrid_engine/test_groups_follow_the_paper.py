"""Generation groups are the paper's, and by the interval rule no rank holds a weight that it does not use."""

from collections.abc import Iterator
from itertools import product

import pytest

from rlhf_api.spec.parallel_sizes import ParallelSizes
from tests.each import each_case
from tests.trainer.hybrid_engine.baselines import Groups, Method, generation_coordinates, generation_groups


def layout(p: int, t: int, d: int, p_g: int, t_g: int) -> ParallelSizes:
    return ParallelSizes(data=d, pipeline=p, tensor=t, generation_pipeline=p_g, generation_tensor=t_g)


def from_one(groups: Groups) -> Groups:
    """Ranks as the paper numbers its GPUs."""
    return [[rank + 1 for rank in group] for group in groups]


PAIRS = [[1, 2], [3, 4], [5, 6], [7, 8]]
INTERVALS = [[1, 3], [2, 4], [5, 7], [6, 8]]
STAGES = [[1, 5], [2, 6], [3, 7], [4, 8]]
EXAMPLES: dict[str, tuple[ParallelSizes, Method, dict[str, Groups]]] = {
    "1-4-2 to 1-2-2-2": (layout(1, 4, 2, 1, 2), "interval", {"tensor": INTERVALS, "micro_data": PAIRS}),
    "the same, vanilla": (layout(1, 4, 2, 1, 2), "consecutive", {"tensor": PAIRS, "micro_data": INTERVALS}),
    "2-4-1 to 1-2-4-1": (
        layout(2, 4, 1, 1, 2),
        "interval",
        {"tensor": INTERVALS, "micro_data": [[1, 2, 5, 6], [3, 4, 7, 8]]},
    ),
    "the same, vanilla, with stages": (
        layout(2, 4, 1, 1, 2),
        "consecutive",
        {"tensor": PAIRS, "micro_data": [[1, 3, 5, 7], [2, 4, 6, 8]]},
    ),
    "2-4-1 to 2-2-2-1": (
        layout(2, 4, 1, 2, 2),
        "interval",
        {"tensor": INTERVALS, "pipeline": STAGES, "micro_data": PAIRS},
    ),
    "4-2-1 to 2-1-4-1": (
        layout(4, 2, 1, 2, 1),
        "interval",
        {"pipeline": STAGES, "micro_data": [[1, 2, 3, 4], [5, 6, 7, 8]]},
    ),
    "1-2-2 to 1-1-2-2": (layout(1, 2, 2, 1, 1), "interval", {"micro_data": [[1, 2], [3, 4]]}),
}


@each_case(("sizes", "method", "expected"), EXAMPLES.values(), ids=EXAMPLES)
def test_the_worked_examples(sizes: ParallelSizes, method: Method, expected: dict[str, Groups]) -> None:
    groups = generation_groups(sizes, method)
    assert {name: from_one(getattr(groups, name)) for name in expected} == expected


def all_layouts() -> Iterator[ParallelSizes]:
    sizes = (1, 2, 4, 8)
    for p, t, d, p_g, t_g in product(sizes, sizes, (1, 2, 3, 4), sizes, sizes):
        if p % p_g == 0 and t % t_g == 0:
            yield layout(p, t, d, p_g, t_g)


def trained(sizes: ParallelSizes, rank: int) -> tuple[int, int]:
    """The (stage, shard) of the model that a rank trains."""
    places = sizes.coordinates(rank)
    return places["pipeline"], places["tensor"]


def generated(sizes: ParallelSizes, rank: int, method: Method) -> set[tuple[int, int]]:
    """The training cells that make up the generation shard of a rank."""
    here, stages, shards = (
        generation_coordinates(sizes, rank, method),
        sizes.pipeline // sizes.generation_pipeline,
        sizes.tensor,
    )
    shards //= sizes.generation_tensor
    return set(
        product(
            range(here.stage * stages, (here.stage + 1) * stages), range(here.shard * shards, (here.shard + 1) * shards)
        )
    )


def test_no_rank_holds_a_weight_twice_or_for_nothing() -> None:
    """Its training cell lies in its generation shard, which the cells of its micro data-parallel group make up."""
    count = 0
    for sizes in all_layouts():
        count += 1
        for group in generation_groups(sizes).micro_data:
            shard = generated(sizes, group[0], "interval")
            assert all(generated(sizes, rank, "interval") == shard for rank in group)
            assert sorted(trained(sizes, rank) for rank in group) == sorted(shard)
    assert count == 400


@pytest.mark.parametrize("method", ["interval", "consecutive"])
def test_every_group_list_holds_every_rank_once(method: Method) -> None:
    for sizes in all_layouts():
        groups = generation_groups(sizes, method)
        for found, size in (
            (groups.tensor, sizes.generation_tensor),
            (groups.pipeline, sizes.generation_pipeline),
            (groups.micro_data, sizes.micro),
        ):
            assert sorted(rank for group in found for rank in group) == list(range(sizes.world_size))
            assert {len(group) for group in found} == {size}


@each_case(
    ("sizes", "redundant"),
    [
        (layout(1, 4, 2, 1, 2), [2, 3, 6, 7]),
        (layout(2, 4, 1, 1, 2), [2, 3, 6, 7]),
        (layout(2, 4, 1, 2, 2), [2, 3, 4, 5, 6, 7]),
        (layout(1, 2, 2, 1, 1), []),
    ],
    ids=str,
)
def test_the_vanilla_rule_holds_a_needless_shard(sizes: ParallelSizes, redundant: list[int]) -> None:
    """M / (tp) on each GPU whose training cell is no part of its generation shard."""
    ranks = range(sizes.world_size)
    found = [rank + 1 for rank in ranks if trained(sizes, rank) not in generated(sizes, rank, "consecutive")]
    assert found == redundant
