"""A change of a series is found where it is, and none in noise or in one line."""

import numpy as np
import pytest

from rlhf_trainer.why.changes import Change, change_of
from rlhf_trainer.why.seen import Array, Series
from tests.each import each_case

STEPS: Array = np.arange(1, 31).astype(np.float64)
NOISE = np.random.default_rng(0).normal(0.0, 0.1, 30)


def change(values: Array) -> Change | None:
    return change_of("reward/mean", Series(STEPS, values))


def test_a_jump() -> None:
    found = change(np.where(STEPS < 12, 1.0, 3.0) + NOISE)
    assert found
    assert (found.kind, found.step) == ("jump", 12)
    assert (found.start, found.end) == pytest.approx((1.0, 3.0), abs=0.1)
    assert str(found).startswith("reward/mean went from 1")


def test_a_bend() -> None:
    found = change(np.minimum(STEPS, 20) * 0.2 - np.maximum(STEPS - 20, 0) * 0.3 + NOISE)
    assert found
    assert found.kind == "bend"
    assert abs(found.step - 20) <= 1
    assert "until step" in str(found)


def test_no_level_is_one_that_was_never_there() -> None:
    """A share that falls to 0 and stays there is not told as negative."""
    found = change_of("clip_fraction", Series(STEPS[:9], np.array([0.117, *[0.0] * 8])))
    assert found
    assert (found.kind, found.middle) == ("bend", 0.0)


@each_case("values", [NOISE, 0.1 * STEPS + NOISE, np.ones(30), 2.0 * STEPS], ids=list("abcd"))
def test_no_change(values: Array) -> None:
    assert change(values) is None


def test_noise_has_few_changes() -> None:
    """Of 200 series of noise, and 200 of a line with noise, at most one in twenty shows a change."""
    draw = np.random.default_rng(1)
    many = [draw.normal(0.0, 1.0, 30) + slope * STEPS for slope in (0.0, 0.1) for _ in range(200)]
    assert sum(change(each) is not None for each in many) <= 20


def test_too_few_values_show_nothing() -> None:
    assert change_of("reward/mean", Series(STEPS[:4], np.array([0.0, 0.0, 9.0, 9.0]))) is None


def test_a_long_series_is_looked_at_in_blocks() -> None:
    steps = np.arange(1, 5001).astype(np.float64)
    values = np.where(steps < 3001, 1.0, 2.0) + np.random.default_rng(2).normal(0.0, 0.1, 5000)
    found = change_of("reward/mean", Series(steps, values))
    assert found
    assert abs(found.step - 3001) <= 25
