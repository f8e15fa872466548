"""Running mean and standard deviation: by hand, and the same however the numbers are cut into batches."""

import random
import statistics
from dataclasses import astuple
from itertools import pairwise

import pytest

from rlhf_trainer.ops.running import RunningMoments
from tests.each import each_case


def merged(*batches: list[float]) -> RunningMoments:
    moments = RunningMoments()
    for batch in batches:
        mean = statistics.fmean(batch) if batch else 0.0
        moments = moments.merge(len(batch), mean, sum((x - mean) ** 2 for x in batch))
    return moments


def test_values_by_hand() -> None:
    # 4, 6 then 1, 5, 9: mean 25 / 5 = 5, squared deviations 1 + 1 + 16 + 0 + 16 = 34
    moments = merged([4.0, 6.0], [1.0, 5.0, 9.0])
    assert astuple(moments) == pytest.approx((5, 5.0, 34.0))
    assert moments.std == pytest.approx((34 / 5) ** 0.5)


def test_batches_of_different_means_by_hand() -> None:
    # 0, 2 then 10: mean 4, squared deviations 16 + 4 + 36 = 56
    moments = merged([0.0, 2.0], [10.0])
    assert astuple(moments) == pytest.approx((3, 4.0, 56.0))


@each_case("cuts", [[], [1], [100], [3, 50, 51, 180]])
def test_any_cut_gives_the_moments_of_all_numbers(cuts: list[int]) -> None:
    draw = random.Random(0)
    numbers = [draw.gauss(1000.0, 3.0) for _ in range(200)]
    edges = [0, *cuts, len(numbers)]
    moments = merged(*(numbers[start:end] for start, end in pairwise(edges)))
    assert moments.count == 200
    assert moments.mean == pytest.approx(statistics.fmean(numbers), rel=1e-12)
    assert moments.std == pytest.approx(statistics.pstdev(numbers), rel=1e-9)


def test_the_order_of_batches_does_not_matter() -> None:
    one, other = [1.0, 2.0, 3.0], [10.0, 20.0]
    assert astuple(merged(one, other)) == pytest.approx(astuple(merged(other, one)))


def test_std_is_one_until_two_numbers_were_seen() -> None:
    assert RunningMoments().std == 1.0
    assert merged([7.0]).std == 1.0
    assert merged([7.0], [9.0]).std == 1.0  # deviations -1 and 1
    assert merged([7.0], [11.0]).std == 2.0
    assert merged([7.0, 7.0]).std == 0.0


def test_an_empty_batch_and_merging_change_nothing_old() -> None:
    assert RunningMoments().merge(0, 0.0, 0.0) == RunningMoments()
    before = merged([4.0, 6.0])
    assert before.merge(0, 0.0, 0.0) == before
    before.merge(1, 100.0, 0.0)
    assert before == RunningMoments(count=2, mean=5.0, m2=2.0)
