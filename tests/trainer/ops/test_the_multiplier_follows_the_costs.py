"""The Lagrange multiplier by hand, and what it does to rewards and costs."""

import math

import pytest
import torch
from torch.testing import assert_close

from rlhf_trainer.ops.lagrange import next_multiplier, reward_less_cost


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (3.0, 2.0 * math.exp(0.1 * 2.0 * 2.0)),  # 2 above the limit
        (1.0, 2.0),
        (0.0, 2.0 * math.exp(-0.1 * 2.0)),
        (1e9, 5.0),
        (-1e9, 1e-6),
    ],
)
def test_it_grows_while_the_cost_is_above_the_limit(cost: float, expected: float) -> None:
    found = next_multiplier(2.0, cost=cost, limit=1.0, learning_rate=0.1, maximum=5.0)
    assert found == pytest.approx(expected)


def test_reward_less_cost_by_hand() -> None:
    found = reward_less_cost(torch.tensor([[4.0, 1.0]]), torch.tensor([[1.0, -2.0]]), multiplier=3.0)
    assert_close(found, torch.tensor([[0.25, 1.75]]))
