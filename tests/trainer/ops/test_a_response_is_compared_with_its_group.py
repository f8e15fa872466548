"""Group-relative and leave-one-out advantages by hand, groups without a signal, rewards to go, penalties of length."""

import math

import pytest
import torch
from torch.testing import assert_close

from rlhf_trainer.ops.advantages import on_every_token, overlong_penalty, rewards_to_go
from rlhf_trainer.ops.groups import first_groups, group_advantages, has_signal, leave_one_out

TWO_GROUPS = torch.tensor([1.0, 3.0, 5.0, 2.0, 2.0, 2.0], dtype=torch.float64)


def test_group_advantages_by_hand() -> None:
    # (1, 3, 5): mean 3, deviations squared 4 + 0 + 4 over G - 1 = 2 give a standard deviation of 2
    found = group_advantages(TWO_GROUPS, group_size=3, by_std=True)
    assert found.tolist() == pytest.approx([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0], abs=1e-6)


def test_without_the_deviation_only_the_mean_is_subtracted() -> None:
    assert group_advantages(TWO_GROUPS, group_size=3, by_std=False).tolist() == [-2.0, 0.0, 2.0, 0.0, 0.0, 0.0]


def test_leave_one_out_by_hand() -> None:
    # the first of (1, 3, 5) is compared with (3 + 5) / 2, and so on
    assert leave_one_out(TWO_GROUPS, group_size=3).tolist() == [-3.0, 0.0, 3.0, 0.0, 0.0, 0.0]


def test_leave_one_out_is_the_centred_return_scaled_up() -> None:
    returns = torch.rand(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centred = group_advantages(returns, group_size=4, by_std=False)
    assert_close(leave_one_out(returns, group_size=4), centred * 4 / 3)


@pytest.mark.parametrize("value", [0.1, -0.3, 1e3 / 7])
def test_rounding_makes_no_advantage_of_equal_returns(value: float) -> None:
    equal = torch.full((3,), value, dtype=torch.float64)
    assert group_advantages(equal, group_size=3, by_std=True).abs().max() < 1e-6


def test_a_group_of_equal_returns_has_no_signal() -> None:
    assert has_signal(TWO_GROUPS, group_size=3).tolist() == [True] * 3 + [False] * 3
    assert not has_signal(torch.tensor([1.0, math.nan, 2.0]), group_size=3).any()


def test_the_first_groups_are_kept_whole() -> None:
    chosen = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1]) > 0
    assert first_groups(chosen, group_size=2, most=2).tolist() == [True, True, False, False, True, True, False, False]
    assert first_groups(chosen, group_size=2, most=9).tolist() == chosen.tolist()


def test_rewards_to_go_by_hand() -> None:
    rewards = torch.tensor([[7.0, -1.0, 2.0, 5.0, math.nan]])
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]])
    assert rewards_to_go(rewards, mask).tolist() == [[0.0, 6.0, 7.0, 5.0, 0.0]]


def test_one_number_a_response_stands_on_every_token() -> None:
    found = on_every_token(torch.tensor([2.0, -1.0]), torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]))
    assert found.tolist() == [[0.0, 2.0, 2.0], [-1.0, 0.0, 0.0]]


def test_the_penalty_grows_over_the_buffer() -> None:
    found = overlong_penalty(torch.tensor([2.0, 6.0, 8.0, 10.0]), max_tokens=10, buffer_tokens=4, coefficient=2.0)
    assert found.tolist() == [0.0, 0.0, 1.0, 2.0]
