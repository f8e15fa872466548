"""Group-relative and leave-one-out advantages by hand, groups without a signal, rewards to go, penalties of length."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlhf_trainer.algorithms.grpo import GRPO
from rlhf_trainer.algorithms.opo import OPO
from rlhf_trainer.algorithms.rloo import RLOO
from rlhf_trainer.ops.advantages import has_signal, on_every_token, overlong_penalty, rewards_to_go
from tests.each import each_case

GROUPED, CENTRED, LEFT_OUT = GRPO(name="GRPO"), GRPO(name="GRPO", normalize_by_std=False), RLOO(name="RLOO")
TWO_GROUPS = torch.tensor([1.0, 3.0, 5.0, 2.0, 2.0, 2.0], dtype=torch.float64)


def group_advantages(returns: Tensor, algorithm: GRPO = GROUPED, *, group_size: int = 3) -> Tensor:
    """GRPO's advantage of each response [N]."""
    mask, rows = torch.ones(len(returns), 1), slice(0, len(returns))
    found = algorithm.advantage(returns, mask[:, 0] > 0, mask, rows=rows, group_size=group_size, prompts=9)
    return found["advantages"]


def kept(signal: Tensor, *, group_size: int, most: int) -> list[float]:
    """Which responses GRPO trains on when more prompts are drawn."""
    algorithm, mask = GRPO(name="GRPO", oversampling=2), torch.ones(len(signal), 1)
    rows = slice(0, len(signal))
    found = algorithm.advantage(mask[:, 0], signal, mask, rows=rows, group_size=group_size, prompts=most)
    return found["response_mask"][:, 0].tolist()


def test_group_advantages_by_hand() -> None:
    # (1, 3, 5): mean 3, deviations squared 4 + 0 + 4 over G - 1 = 2 give a standard deviation of 2
    assert group_advantages(TWO_GROUPS).tolist() == pytest.approx([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0], abs=1e-6)


def test_without_the_deviation_only_the_mean_is_subtracted() -> None:
    assert group_advantages(TWO_GROUPS, CENTRED).tolist() == [-2.0, 0.0, 2.0, 0.0, 0.0, 0.0]


def test_leave_one_out_by_hand() -> None:
    # the first of (1, 3, 5) is compared with (3 + 5) / 2, and so on
    assert LEFT_OUT.advantage(TWO_GROUPS, group_size=3).tolist() == [-3.0, 0.0, 3.0, 0.0, 0.0, 0.0]


def test_leave_one_out_is_the_centred_return_scaled_up() -> None:
    returns = torch.rand(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centred = group_advantages(returns, CENTRED, group_size=4)
    assert_close(LEFT_OUT.advantage(returns, group_size=4), centred * 4 / 3)


@pytest.mark.parametrize("value", [0.1, -0.3, 1e3 / 7])
def test_rounding_makes_no_advantage_of_equal_returns(value: float) -> None:
    equal = torch.full((3,), value, dtype=torch.float64)
    assert group_advantages(equal).abs().max() < 1e-6


def test_a_group_of_equal_returns_has_no_signal() -> None:
    everyone = torch.ones(6) > 0
    assert has_signal(TWO_GROUPS, everyone, group_size=3).tolist() == [True] * 3 + [False] * 3
    assert not has_signal(torch.tensor([1.0, math.nan, 2.0]), everyone[:3], group_size=3).any()


def test_a_response_without_a_score_makes_no_signal() -> None:
    scores, counted = torch.tensor([1.0, 9.0, 1.0, 1.0, 9.0, 2.0]), torch.tensor([1, 0, 1, 1, 0, 1]) > 0
    assert has_signal(scores, counted, group_size=3).tolist() == [False] * 3 + [True] * 3
    assert not has_signal(scores, counted & False, group_size=3).any()


SCORED_BY_ALL_BUT_ONE = [1.0, math.nan, 3.0, 5.0], [1.0, 3.0, 5.0]
"""The returns of four responses of which one has none, and of the others alone."""
COMPARING: dict[str, Callable[[Tensor, int], Tensor]] = {
    "GRPO": lambda returns, size: group_advantages(returns, group_size=size),
    "Dr. GRPO": lambda returns, size: group_advantages(returns, CENTRED, group_size=size),
    "RLOO": lambda returns, size: LEFT_OUT.advantage(returns, group_size=size),
    "OPO": lambda returns, size: OPO(name="OPO").advantage(returns, 2.0 + returns, group_size=size),
}


@each_case("name", COMPARING)
def test_a_response_without_a_return_changes_no_other(name: str) -> None:
    more, fewer = (torch.tensor(returns, dtype=torch.float64) for returns in SCORED_BY_ALL_BUT_ONE)
    found = COMPARING[name](more, 4)
    assert found[1].isnan()
    assert_close(found[[0, 2, 3]], COMPARING[name](fewer, 3))


@each_case("name", COMPARING)
def test_the_only_response_with_a_return_is_compared_with_none(name: str) -> None:
    alone = torch.tensor([math.nan, 4.0, math.nan], dtype=torch.float64)
    assert COMPARING[name](alone, 3)[1] == 0.0


def test_the_first_groups_are_kept_whole() -> None:
    chosen = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1]) > 0
    assert kept(chosen, group_size=2, most=2) == [1, 1, 0, 0, 1, 1, 0, 0]
    assert kept(chosen, group_size=2, most=9) == chosen.tolist()


def test_rewards_to_go_by_hand() -> None:
    rewards = torch.tensor([[7.0, -1.0, 2.0, 5.0, math.nan]])
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]])
    assert rewards_to_go(rewards, mask).tolist() == [[0.0, 6.0, 7.0, 5.0, 0.0]]


def test_one_number_a_response_stands_on_every_token() -> None:
    found = on_every_token(torch.tensor([2.0, -1.0]), torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]))
    assert found.tolist() == [[0.0, 2.0, 2.0], [-1.0, 0.0, 0.0]]


def test_the_penalty_grows_over_the_buffer() -> None:
    found = overlong_penalty(torch.tensor([2.0, 6.0, 8.0, 10.0, 11.0]), max_tokens=10, buffer_tokens=4, coefficient=2.0)
    assert found.tolist() == [0.0, 0.0, 1.0, 2.0, 2.0]
